// Scene 2: the effect of d_k and of the factor c on random logits.

const FACTORS = { inv_sqrt: (width) => width ** -0.5, unscaled: () => 1, inv: (width) => 1 / width };
const SLICE = 12; // milliseconds of counting between two updates of the page
const PICTURED = 8; // number of batches in the histogram
const BINS = 49;
const EDGE = 12; // the end of the histogram; larger values are given as a share
const SHARES = new Set(["saturation_90", "saturation_99", "overflow", "repaired", "zeros"]);

const headDim = () => 2 ** state.width;
const numKeys = () => 2 ** state.keys;
const numVisible = () => (state.half === "half" ? numKeys() / 2 : numKeys());
const ownFactor = () => 2 ** state.own;
const turn = () => Math.sqrt(2 * Math.log(numVisible()));
const factorsShown = () => ({ ...Object.fromEntries(Object.entries(FACTORS).map(([name, of]) => [name, of(headDim())])), ...(state.factor === "own" ? { own: ownFactor() } : {}) });

let sample = null;
let counts = {}; // the Statistics of each factor
let counted = 0; // number of batches
let counting = null;

// Three significant digits, except for 0 and 1.
function digits(x) {
  if (x === 0 || x === 1) return String(x);
  if (Math.abs(x) >= 100) return fixed(x, 0);
  return Math.abs(x) < 1e-3 ? x.toExponential(1).replaceAll("-", "−") : x.toPrecision(3).replace("-", "−");
}

const said = (name, x) => (SHARES.has(name) && x > 0 ? `${digits(100 * x)} %` : digits(x));

function countAgain() {
  const { seed } = state;
  if (!sample || sample.headDim !== headDim() || sample.numKeys !== numKeys() || sample.seed !== seed) sample = new Sample(headDim(), numKeys(), seed);
  counts = Object.fromEntries(Object.entries(factorsShown()).map(([name, c]) => [name, new Statistics(c, numVisible())]));
  counted = 0;
  clearTimeout(counting);
  count(true);
}

// Count a slice, update the page, and continue until all rows are counted.
function count(isFirst = false) {
  const until = performance.now() + SLICE;
  do {
    for (const statistics of Object.values(counts)) statistics.add(sample.batch(counted), numKeys());
    counted += 1;
  } while (counted < BATCHES && performance.now() < until);
  showCounts(isFirst || counted === BATCHES);
  if (counted < BATCHES) counting = setTimeout(count);
}

// --- draw

function showWidth() {
  const show = (id, value, text) => {
    const input = byId(id);
    input.value = value;
    input.ariaValueText = text;
    document.querySelector(`output[for=${id}]`).textContent = text;
  };
  show("head-dim", state.width, headDim().toLocaleString("en"));
  show("num-keys", state.keys, String(numKeys()));
  show("own", state.own, digits(ownFactor()));
  byId("own-factor").hidden = state.factor !== "own";
  setChoice(byId("factor"), state.factor);
  setChoice(byId("half"), state.half);
  if (byId("seed") !== document.activeElement) byId("seed").value = state.seed;
  writePlayAddress();
  if (state.scene === 2) countAgain();
}

// `isSaid`: screen readers read the words above the pictures, so they do not change with each slice.
function showCounts(isSaid) {
  const found = Object.fromEntries(Object.entries(counts).map(([name, statistics]) => [name, statistics.found()]));
  const mine = found[state.factor];
  const isBeyond = mine.row_std > turn();
  const verdict = words().verdict[isBeyond ? "beyond" : "below"](digits(mine.row_std), fixed(turn(), 2));
  if (isSaid) byId("verdict").textContent = verdict;
  byId("verdict").classList.toggle("beyond", isBeyond);
  drawLogits(mine);
  drawWeights();
  const { rows, caption, counting: still, statistic, factors, yours } = words();
  const done = (counted * QUERIES).toLocaleString("en");
  document.querySelector("#statistics caption").textContent = `${caption(done, numVisible())} ${counted < BATCHES ? still : ""}`;
  byId("statistics").dataset.rows = counted * QUERIES;
  const classOf = (factor) => (factor === state.factor ? "number chosen" : "number");
  const name = (factor) => (factor === "own" ? `${yours}: ${digits(ownFactor())}` : factors[factor]);
  const heads = Object.keys(found).map((factor) => header("col", name(factor), classOf(factor)));
  byId("statistics").tHead.replaceChildren(tableLine(header("col", statistic), ...heads));
  document.querySelector("#statistics tbody").replaceChildren(...Object.entries(rows).map(([key, text]) => {
    const cells = Object.entries(found).map(([factor, of]) => {
      const cell = element("td", classOf(factor), said(key, of[key]));
      Object.assign(cell.dataset, { name: key, factor, value: of[key] });
      return cell;
    });
    return tableLine(header("row", text), ...cells);
  }));
}

// --- pictures

const FRAME = { left: 8, right: 412, top: 12, bottom: 164 };

function drawLogits({ row_std, max_logit }) {
  const c = factorsShown()[state.factor];
  const bins = new Float64Array(BINS);
  const outside = [0, 0];
  let seen = 0;
  for (let number = 0; number < Math.min(counted, PICTURED); number++) {
    const dots = sample.batch(number);
    for (let start = 0; start < dots.length; start += numKeys()) {
      for (let j = 0; j < numVisible(); j++) {
        const z = c * dots[start + j];
        outside[0] += z < -EDGE;
        outside[1] += z > EDGE;
        seen += 1;
        if (Math.abs(z) < EDGE) bins[Math.floor((z / EDGE + 1) * (BINS / 2))] += 1;
      }
    }
  }
  const most = bins.reduce((a, b) => Math.max(a, b), 1);
  const { left, right, top, bottom } = FRAME;
  const x = (z) => (left + right) / 2 + (clamp(z / EDGE, -1, 1) * (right - left)) / 2;
  const step = (right - left) / BINS;
  const parts = [shape("rect", { class: "inside", x: x(-turn()), y: top, width: x(turn()) - x(-turn()), height: bottom - top })];
  bins.forEach((n, i) => {
    const height = ((bottom - top) * n) / most;
    parts.push(shape("rect", { class: "bar", x: left + i * step + 0.5, y: bottom - height, width: step - 1, height }));
  });
  parts.push(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const side of [-1, 1]) {
    const at = x(side * turn());
    parts.push(shape("line", { class: "turn", x1: at, x2: at, y1: top, y2: bottom }));
    const share = outside[(side + 1) / 2] / seen;
    const text = side < 0 ? `← ${said("overflow", share)}` : `${said("overflow", share)} →`;
    if (share > 0) parts.push(shape("text", { class: "outside", x: side < 0 ? left : right, y: top + 12, "text-anchor": side < 0 ? "start" : "end" }, text));
  }
  for (const z of [-EDGE, -EDGE / 2, 0, EDGE / 2, EDGE]) {
    const anchor = z === -EDGE ? "start" : z === EDGE ? "end" : "middle";
    parts.push(shape("text", { x: x(z), y: bottom + 18, "text-anchor": anchor }, tidy(z)));
  }
  byId("logits").replaceChildren(...parts);
  byId("logits").ariaLabel = words().logits_label(digits(row_std), digits(max_logit));
}

function drawWeights() {
  const dots = Array.from(sample.batch(0).subarray(0, numVisible()));
  const z = dots.map((x) => factorsShown()[state.factor] * x);
  const top = Math.max(...z);
  const exps = z.map((one) => Math.exp(one - top));
  const weights = exps.map((e) => e / total(exps));
  const entropy = -total(weights.map((p) => (p > 0 ? p * Math.log(p) : 0))) / Math.log(weights.length);
  const { left, right, top: ceiling, bottom } = FRAME;
  const start = left + 26;
  const step = (right - start) / numKeys();
  const parts = [0, 0.5, 1].flatMap((p) => {
    const y = bottom - p * (bottom - ceiling);
    return [shape("line", { class: "axis", x1: start, x2: right, y1: y, y2: y }), shape("text", { x: left, y: y + 4 }, String(p))];
  });
  weights.forEach((p, j) => {
    const height = Math.max(p * (bottom - ceiling), 0);
    parts.push(shape("rect", { class: "bar", x: start + j * step + step * 0.1, y: bottom - height, width: step * 0.8, height }));
  });
  const hidden = numKeys() - weights.length;
  if (hidden) parts.push(shape("rect", { class: "hidden-keys", x: start + weights.length * step, y: ceiling, width: hidden * step, height: bottom - ceiling }));
  for (const j of [1, numKeys()]) {
    parts.push(shape("text", { x: start + (j - 0.5) * step, y: bottom + 18, "text-anchor": j === 1 ? "start" : "end" }, `k${j}`));
  }
  const most = digits(Math.max(...weights));
  byId("weights").replaceChildren(...parts);
  byId("weights").ariaLabel = words().row_label(weights.length, most);
  byId("weights-title").textContent = words().row_title(most, digits(entropy));
}

function buildWidth() {
  for (const [id, texts] of [["factor", words().factors], ["half", words().halves]]) {
    buildChoice(id, texts, (value) => {
      state[id] = value;
      showWidth();
    });
  }
  document.querySelector("#width dl").replaceChildren(...Object.entries(words().meanings).flatMap(([term, text]) => [element("dt", "", term), element("dd", "", text)]));
  showWidth();
}

function startWidth() {
  for (const [id, name] of Object.entries({ "head-dim": "width", "num-keys": "keys", own: "own" })) {
    byId(id).addEventListener("input", (event) => {
      state[name] = Number(event.target.value);
      showWidth();
    });
  }
  byId("seed").addEventListener("input", (event) => {
    const { value, valueAsNumber } = event.target;
    const good = /^\d{1,4}$/.test(value);
    event.target.ariaInvalid = String(!good);
    if (!good) return;
    state.seed = valueAsNumber;
    showWidth();
  });
}
