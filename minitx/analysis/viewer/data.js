// The data in the page, and values derived from them.

const DATA = JSON.parse(document.getElementById("data").textContent);
const TRACES = DATA.traces;
const COMPARES = TRACES.length > 1;
const NAMES = COMPARES ? ["A", "B"] : [""];

// All steps of both models. A model without a snapshot at a step shows its latest earlier snapshot.
const numbered = TRACES.flatMap((trace) => trace.snapshots.map((s) => s.step)).filter((step) => step !== null);
const STEPS = numbered.length ? [...new Set(numbered)].sort((a, b) => a - b) : [null];

const GROUPS = groups();

function groups() {
  const found = new Map();
  DATA.layers.forEach((layer, i) => {
    const key = `${layer.kind} ${layer.queries}`;
    if (!found.has(key)) found.set(key, { kind: layer.kind, layers: [] });
    found.get(key).layers.push(i);
  });
  const all = [...found.values()];
  const crosses = all.some((group) => group.kind === "cross");
  for (const group of all) group.name = crosses ? { self: "encoder", causal: "decoder", cross: "cross" }[group.kind] : group.kind;
  const order = ["self", "causal", "cross"];
  return all.sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
}

const labelOf = (group) => words().groups[group.name];
const groupOf = (layer) => GROUPS.find((group) => group.layers.includes(layer));

function snapshotAt(trace, step) {
  const at = TRACES[trace].snapshots.findLastIndex((s) => s.step === null || s.step <= STEPS[step]);
  return Math.max(at, 0);
}

function bytes(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

const unpackedMasks = new Map();

function mask(number, size) {
  if (!unpackedMasks.has(number)) {
    const bits = bytes(DATA.masks[number]);
    unpackedMasks.set(number, Uint8Array.from({ length: size }, (_, i) => (bits[i >> 3] >> (i & 7)) & 1));
  }
  return unpackedMasks.get(number);
}

// A full layer takes 4 bytes per cell, so only the latest layers are kept.
const KEPT_CELLS = 2 ** 26;
const unpacked = new Map();
let cellsKept = 0;

// One layer of one snapshot: for each head { weights, visible } over L × S, { entropy, logit } over L.
function heads(trace, snapshot, layer) {
  const key = `${trace} ${snapshot} ${layer}`;
  if (!unpacked.has(key)) {
    const [H, L, S] = DATA.layers[layer].shape;
    for (const [old, found] of unpacked) {
      if (cellsKept + H * L * S <= KEPT_CELLS) break;
      cellsKept -= found.length * found[0].weights.length;
      unpacked.delete(old);
    }
    cellsKept += H * L * S;
    unpacked.set(key, unpack(TRACES[trace].snapshots[snapshot].layers[layer], H, L, S));
  }
  return unpacked.get(key);
}

function unpack(packed, H, L, S) {
  const numbers = new Uint16Array(bytes(packed.weights).buffer);
  const entropy = new Float32Array(bytes(packed.entropy).buffer);
  const logit = new Float32Array(bytes(packed.max_logit).buffer);
  const [low, high] = packed.range;
  let next = 0;
  return packed.masks.map((number, h) => {
    const visible = mask(number, L * S);
    const weights = new Float32Array(L * S);
    for (let i = 0; i < weights.length; i++) {
      if (!visible[i]) continue;
      const n = numbers[next++];
      weights[i] = n > DATA.full ? NaN : low + (n / DATA.full) * (high - low);
    }
    return { weights, visible, entropy: entropy.subarray(h * L, (h + 1) * L), logit: logit.subarray(h * L, (h + 1) * L) };
  });
}

// The values that a pane shows of one head: model A, model B, or A − B.
function field(pane, layer, head) {
  const of = (trace) => heads(trace, snapshotAt(trace, state.step), layer)[head];
  if (pane !== "diff") return { ...of(pane === "b" ? 1 : 0), signed: false };
  const [a, b] = [of(0), of(1)];
  const minus = (x, y) => x.map((value, i) => value - y[i]);
  return {
    weights: minus(a.weights, b.weights),
    visible: a.visible === b.visible ? a.visible : a.visible.map((bit, i) => bit | b.visible[i]),
    entropy: minus(a.entropy, b.entropy),
    logit: minus(a.logit, b.logit),
    signed: true,
  };
}

const largest = (values) => values.reduce((top, v) => (Math.abs(v) > top || Number.isNaN(top) ? Math.abs(v) : top), NaN);

function mean(values) {
  const counted = values.filter((v) => !Number.isNaN(v));
  return counted.length ? counted.reduce((sum, v) => sum + v, 0) / counted.length : NaN;
}

const PICTURES = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
const UNSEEN = /[\p{Zs}\p{Zl}\p{Zp}\p{Cc}\p{Cf}\p{Cs}\p{Cn}\u115f\u1160\u2800\u3164\uffa0]/gu;
const JOINER = /[\u200c\u200d]/; // they shape neighbouring letters, and are only shown if they stand alone

function shown(text) {
  if (text === "") return "∅";
  const base = /^\p{M}/u.test(text) ? "◌" + text : text;
  return base.replace(UNSEEN, (c) => {
    if (JOINER.test(c) && text.length > 1) return c;
    return PICTURES[c] ?? `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

const tokens = Object.fromEntries(Object.entries(DATA.tokens).map(([axis, texts]) => [axis, texts.map(shown)]));
const queriesOf = (layer) => tokens[DATA.layers[layer].queries];
const keysOf = (layer) => tokens[DATA.layers[layer].keys];
