// The state of the page, its address, and the controls that change it.

const VIEWS = COMPARES ? ["a", "b", "both", "diff"] : ["a"];
const SCALES = ["root", "linear", "largest"];
const CELL = { smallest: 2, largest: 44, readable: 12.5, lying: 20 }; // pixels

// layer: its number in DATA.layers. step: its number in STEPS. q, k: the cell with the cursor. extra: further heads whose
// lines are drawn. out: whether `head` is knocked out, if the page has the answers without it. zoom: pixels per cell, null: fit to the
// page. theme: null: as the system.
// lang: "en" or "zh".
const START = () => ({
  layer: GROUPS[0].layers[0],
  head: 0,
  step: STEPS.length - 1,
  view: COMPARES ? "both" : "a",
  q: Infinity, // the last query, which predicts the next token, and the key with its largest weight
  k: Infinity,
  extra: new Set(),
  hatch: true,
  scale: "root",
  zoom: null,
  out: false,
  theme: null,
  lang: systemLanguage(),
});
const state = START();

// Move every value into its valid range.
function settle() {
  const within = (value, count, fallback) => (Number.isNaN(Number(value)) ? fallback : clamp(value, 0, count - 1));
  state.layer = within(state.layer, DATA.layers.length, 0);
  const [H, L, S] = DATA.layers[state.layer].shape;
  if (!VIEWS.includes(state.view)) state.view = VIEWS[0];
  state.head = within(state.head, H, 0);
  state.step = within(state.step, STEPS.length, STEPS.length - 1);
  if (state.q === Infinity && KNOWS_WITHOUT) state.q = lastAsked(state.layer) ?? state.q;
  state.q = within(state.q, L, 0);
  if (state.k === Infinity) state.k = favourite(field(panes()[0], state.layer, state.head), state.q, S);
  state.k = within(state.k, S, 0);
  if (!SCALES.includes(state.scale)) state.scale = SCALES[0];
  state.extra = new Set([...state.extra].filter((h) => Number.isInteger(h) && h >= 0 && h < H && h !== state.head));
  state.zoom = Number.isFinite(state.zoom) && state.zoom !== null ? clamp(state.zoom, CELL.smallest, CELL.largest) : null;
  state.out &&= KNOWS_WITHOUT;
  if (!["light", "dark"].includes(state.theme)) state.theme = null;
  if (!(state.lang in WORDS)) state.lang = systemLanguage();
}

function favourite({ weights }, q, S) {
  const row = weights.subarray(q * S, (q + 1) * S).map(Math.abs);
  return Math.max(row.indexOf(largest(row)), 0);
}

function readAddress() {
  const address = addressed();
  Object.assign(state, START()); // for the values that it does not name
  const number = (name) => (/^\d+$/.test(address.get(name) ?? "") ? Number(address.get(name)) : undefined);
  for (const name of ["layer", "head", "q", "k", "zoom"]) state[name] = number(name) ?? state[name];
  for (const name of ["view", "scale", "theme", "lang"]) state[name] = address.get(name) ?? state[name];
  const step = STEPS.indexOf(number("step"));
  if (step >= 0) state.step = step;
  if (address.has("heads")) state.extra = new Set(address.get("heads").split(".").map(Number));
  state.out = address.get("out") === "1";
  state.hatch = address.get("hatch") !== "0";
  settle();
}

function writeAddress() {
  const { layer, head, view, q, k } = state;
  const said = { layer, head, q, k };
  if (COMPARES) said.view = view;
  if (STEPS.length > 1) said.step = STEPS[state.step];
  if (state.extra.size) said.heads = [...state.extra].join(".");
  if (!state.hatch) said.hatch = 0;
  if (state.out) said.out = 1;
  if (state.scale !== SCALES[0]) said.scale = state.scale;
  for (const name of ["zoom", "theme"]) if (state[name] !== null) said[name] = state[name];
  if (state.lang !== systemLanguage()) said.lang = state.lang;
  putAddress(said);
}

// --- the row of controls

// Update the texts that depend on the language.
function buildChoices() {
  buildChoice("group", { ...GROUPS.map(labelOf) }, (i) => {
    const from = groupOf(state.layer);
    const depth = from.layers.indexOf(state.layer);
    const to = GROUPS[i].layers;
    update({ layer: to[Math.min(depth, to.length - 1)] });
  });
  buildChoice("view", Object.fromEntries(VIEWS.map((view) => [view, words().views[view]])), (view) => update({ view }));
  for (const name of ["help", "details"]) byId(`${name}-list`).replaceChildren(...words()[`${name}_list`].map((text) => element("li", "", text)));
}

function buildControls() {
  byId("steps").hidden = STEPS.length < 2;
  byId("step").max = STEPS.length - 1;
  byId("step").addEventListener("input", (event) => update({ step: Number(event.target.value) }));
  byId("play").addEventListener("click", () => play(timer === null));
  byId("scale").addEventListener("change", (event) => update({ scale: event.target.value }));
  byId("hatch").addEventListener("change", (event) => update({ hatch: event.target.checked }));
  byId("out").addEventListener("click", () => update({ out: !state.out }));
  byId("more").addEventListener("click", () => showMore(byId("more").ariaExpanded !== "true"));
  byId("smaller").addEventListener("click", () => zoomBy(1 / 1.4));
  byId("larger").addEventListener("click", () => zoomBy(1.4));
  byId("fit").addEventListener("click", () => update({ zoom: null }));
  byId("language").addEventListener("click", () => update({ lang: otherLanguage() }));
  byId("theme").addEventListener("click", () => update({ theme: theme() === "dark" ? "light" : "dark" }));
  byId("models").replaceChildren(...TRACES.map((trace, i) => {
    const item = element("li");
    if (COMPARES) item.append(element("b", "model", NAMES[i]));
    item.append(element("bdi", "", trace.name));
    const title = trace.snapshots.at(-1).title;
    if (title && title !== trace.name) item.append(element("bdi", "soft", title));
    return item;
  }));
}

// On a phone, rarely used controls are behind a button.
function showMore(on) {
  byId("more").ariaExpanded = String(on);
  byId("controls").classList.toggle("all", on);
}

const TITLE = byId("title").textContent;
let shownLanguage = null;

function showControls() {
  showTheme();
  if (state.lang !== shownLanguage) {
    showLanguage();
    byId("title").textContent = words().told(TITLE);
    buildChoices();
    showPlaying();
    [shownLanguage, builtThumbs, views] = [state.lang, "", []]; // everything else is rebuilt
  }
  setChoice(byId("group"), GROUPS.indexOf(groupOf(state.layer)));
  setChoice(byId("view"), state.view);
  byId("step").value = state.step;
  byId("step").ariaValueText = stepText(state.step);
  byId("step-text").textContent = stepText(state.step);
  byId("scale").value = state.scale;
  byId("hatch").checked = state.hatch;
  document.body.classList.toggle("hatched", state.hatch);
}

const stepText = (i) => (STEPS[i] === null ? "" : words().step_text(STEPS[i].toLocaleString("en"), i + 1, STEPS.length));

let timer = null;
const PLAYS = clamp(12000 / STEPS.length, 150, 700); // milliseconds per step

function play(on) {
  clearInterval(timer);
  timer = null;
  if (on) {
    if (state.step === STEPS.length - 1) update({ step: 0 });
    timer = setInterval(() => {
      update({ step: state.step + 1 });
      if (state.step === STEPS.length - 1) play(false);
    }, PLAYS);
  }
  showPlaying();
}

function showPlaying() {
  byId("play").textContent = words()[timer === null ? "play" : "pause"];
  byId("play").ariaPressed = String(timer !== null);
}

// --- layers × heads

let builtThumbs = "";
let drawnThumbs = "";

function showThumbs() {
  const layers = groupOf(state.layer).layers;
  const H = Math.max(...layers.map((layer) => DATA.layers[layer].shape[0]));
  const built = layers.join();
  if (built !== builtThumbs) buildThumbs(layers, H);
  const drawn = [built, state.view, state.step, state.scale, theme(), state.lang].join(" "); // other changes do not affect them
  const wide = panes().length > 1 ? 1.7 : 1;
  byId("thumbs").style.setProperty("--thumb", `${Math.round(wide * (H > 8 ? 40 : H > 4 ? 52 : 64))}px`);
  for (const button of byId("thumbs").querySelectorAll("button")) {
    const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
    const chosen = layer === state.layer && head === state.head;
    button.ariaChecked = String(chosen);
    button.tabIndex = chosen ? 0 : -1;
    if (drawn !== drawnThumbs) showThumb(button, layer, head);
  }
  [builtThumbs, drawnThumbs] = [built, drawn];
}

function buildThumbs(layers, H) {
  const grid = byId("thumbs");
  grid.style.setProperty("--heads", H);
  const cells = [element("span"), ...Array.from({ length: H }, (_, h) => element("span", "name", `h${h}`))];
  layers.forEach((layer) => {
    cells.push(element("span", "name", `L${DATA.layers[layer].number}`));
    for (let head = 0; head < H; head++) {
      if (head >= DATA.layers[layer].shape[0]) {
        cells.push(element("span"));
        continue;
      }
      const button = Object.assign(buildButton("thumb", "", () => update({ layer, head })), { role: "radio" });
      Object.assign(button.dataset, { layer, head });
      cells.push(button);
    }
  });
  grid.replaceChildren(...cells);
}

function showThumb(button, layer, head) {
  const [, L, S] = DATA.layers[layer].shape;
  const fields = panes().map((pane) => field(pane, layer, head));
  const top = topOf(fields);
  const pictures = fields.map((one) => {
    const canvas = element("canvas", Math.max(L, S) < 40 ? "large" : "");
    paint(canvas, one, L, S, top);
    return canvas;
  });
  const picture = element("span", "pictures");
  picture.style.aspectRatio = String(fields.length * clamp(S / L, 0.4, 2.5));
  picture.append(...pictures);
  const say = (value, digits) => (fields[0].signed && value > 0 ? "+" : "") + known(value, digits);
  const of = ({ entropy, logit }) => [mean(entropy), largest(logit)];
  const numbers = fields.map((one) => {
    if (!one.signed) return of(one);
    const [a, b] = ["a", "b"].map((pane) => of(field(pane, layer, head)));
    return a.map((value, i) => value - b[i]);
  });
  const line = (i, digits, name) => `${name} ${numbers.map((n) => say(n[i], digits).replace(/^([+−]?)0\./, "$1.")).join(" | ")}`;
  button.replaceChildren(picture, element("span", "numbers", line(0, 2, "H̄")), element("span", "numbers", line(1, 1, "z")));
  const told = fields.map((_, i) => `${panes().length > 1 ? `${NAMES[i]}: ` : ""}${words().head_told(say(numbers[i][0], 2), say(numbers[i][1], 1))}`);
  button.dataset.label = button.ariaLabel = `${words().head_label(DATA.layers[layer].number, head)}; ${fields[0].signed ? "A − B: " : ""}${told.join("; ")}`;
}

function moveAmongThumbs(event) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const key = keyOf(event);
  if (!(key in moves)) return;
  event.preventDefault();
  const layers = groupOf(state.layer).layers;
  const [down, right] = moves[key];
  const layer = layers[clamp(layers.indexOf(state.layer) + down, 0, layers.length - 1)];
  update({ layer, head: clamp(state.head + right, 0, DATA.layers[layer].shape[0] - 1) });
  byId("thumbs").querySelector("[aria-checked=true]").focus();
}
