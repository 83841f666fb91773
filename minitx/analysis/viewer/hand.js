// Scene 1: one row of attention, by hand.

const STEPS_BY_HAND = 7;
const LIMIT = 99; // of a typed number
const TOKENS = { least: 2, most: 6 };
const NAMES_OF_STEPS = ["dot", "z", "m", "e", "sum", "p", "out"]; // what each step computes
// The columns of the table: the first step that shows a column, and the last step that reads it.
const COLUMNS = { k: [1, 1], dot: [1, 2], z: [2, 3], seen: [3, 3], m: [3, 4], e: [4, 6], p: [6, 7], v: [7, 7], pv: [7, 7] };
const WIDE = new Set(["k", "v", "pv"]); // three numbers each
// As in examples/attention.ipynb, but for the last query.
const START = () => ({
  tokens: null, // null: the tokens of the language
  q: [[1, 0, 1], [0, 2, 0], [1, 1, 0], [1, 2, 0]],
  k: [[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]],
  v: [[1, 0, 0], [0, 10, 0], [0, 0, 5], [2, 2, 2]],
  query: 3,
  mask: "none",
  own: [true, true, true, true],
});

const tokensByHand = () => state.hand.tokens ?? words().words;

function visibleByHand() {
  const { mask, query, own } = state.hand;
  return tokensByHand().map((_, j) => (mask === "none" ? true : mask === "causal" ? j <= query : own[j]));
}

const byHand = () => attend(state.hand.q[state.hand.query], state.hand.k, state.hand.v, visibleByHand());

const narrow = matchMedia("(max-width: 700px)");

// Integers as they are, others with 4 decimals (3 on a narrow page), smaller numbers with an exponent.
function tidy(x) {
  if (x === -Infinity) return "−∞";
  if (Number.isInteger(x)) return String(x).replace("-", "−");
  const decimals = narrow.matches ? 3 : 4;
  return Math.abs(x) < 0.5 * 10 ** -decimals ? x.toExponential(1).replaceAll("-", "−") : fixed(x, decimals);
}

// A number as a factor. Negative numbers are in brackets.
const factor = (x) => (x < 0 ? `(${tidy(x)})` : tidy(x));

// --- the numbers by name: "dot-2", "pv-0-1"; sum, psum and out-d are in the last row

function valueOf(id, found) {
  const [name, i, d] = id.split("-");
  const { hand } = state;
  return {
    q: () => hand.q[hand.query][i],
    k: () => hand.k[i][d],
    v: () => hand.v[i][d],
    dot: () => found.dots[i],
    z: () => found.scores[i],
    m: () => found.masked[i],
    e: () => found.exps[i],
    p: () => found.weights[i],
    pv: () => found.parts[i][d],
    sum: () => found.sum,
    psum: () => total(found.weights),
    out: () => found.output[i],
  }[name]();
}

// How a number is computed: the calculation as a text, and the names of the numbers in it.
function originOf(id, found) {
  const [name, i, d] = id.split("-");
  const say = (other) => tidy(valueOf(other, found));
  const each = (make) => tokensByHand().map((_, j) => make(j));
  const three = [0, 1, 2];
  const hidden = found.masked[i] === -Infinity;
  const sumOf = (left, from) => [`${left} = ${from.map((other) => factor(valueOf(other, found))).join(" + ")} = ${say(id)}`, from];
  return {
    dot: () => [`q·k = ${three.map((c) => `${factor(valueOf(`q-${c}`, found))} × ${factor(valueOf(`k-${i}-${c}`, found))}`).join(" + ")} = ${say(id)}`, three.flatMap((c) => [`q-${c}`, `k-${i}-${c}`])],
    z: () => [`z = ${say(`dot-${i}`)} / √3 = ${say(`dot-${i}`)} / 1.7321 = ${say(id)}`, [`dot-${i}`]],
    m: () => [hidden ? `z = −∞: ${words().hidden_key}` : `z = ${say(id)}`, [`z-${i}`, `seen-${i}`]],
    e: () => [hidden ? words().hidden_exp : `exp(z − max) = exp(${say(`m-${i}`)} − ${factor(found.top)}) = exp(${tidy(found.masked[i] - found.top)}) = ${say(id)}`, [`m-${i}`, `m-${found.masked.indexOf(found.top)}`]],
    sum: () => sumOf("Σ", each((j) => `e-${j}`)),
    p: () => [found.sum > 0 ? `p = ${say(`e-${i}`)} / ${say("sum")} = ${say(id)}` : words().nothing_seen, [`e-${i}`, "sum"]],
    psum: () => sumOf("Σ p", each((j) => `p-${j}`)),
    pv: () => [`p·v = ${say(`p-${i}`)} × ${factor(valueOf(`v-${i}-${d}`, found))} = ${say(id)}`, [`p-${i}`, `v-${i}-${d}`]],
    out: () => sumOf(`o${"₁₂₃"[i]}`, each((j) => `pv-${j}-${i}`)),
  }[name]();
}

// --- the table, rebuilt when tokens, query or language change

function numberInput(id, name, token, d) {
  const input = Object.assign(document.createElement("input"), { type: "number", step: "0.1", min: -LIMIT, max: LIMIT });
  input.dataset.id = id;
  input.ariaLabel = words().number_label(name, token, d + 1);
  input.setAttribute("aria-describedby", "problem");
  input.addEventListener("input", () => typeNumber(input, id));
  return input;
}

function typeNumber(input, id) {
  const good = input.value !== "" && Math.abs(input.valueAsNumber) <= LIMIT;
  input.ariaInvalid = String(!good);
  complain();
  if (!good) return;
  const [name, i, d] = id.split("-").map((part, at) => (at ? Number(part) : part));
  if (name === "q") state.hand.q[state.hand.query][i] = input.valueAsNumber;
  else state.hand[name][i][d] = input.valueAsNumber;
  showHand();
}

// Report what is wrong in the boxes, for numbers and tokens.
function complain() {
  const found = Object.entries({ number_problem: "[type=number]", token_problem: "#tokens" }).filter(([, which]) => document.querySelector(`#hand input${which}[aria-invalid=true]`));
  byId("problem").hidden = !found.length;
  byId("problem").textContent = found.map(([problem]) => words()[problem]).join(" ");
}

function numberButton(id) {
  const button = buildButton("cell", "", () => {
    state.cell = id;
    showHand();
  });
  button.dataset.id = id;
  return button;
}

function cellsOf(column, make) {
  return Array.from({ length: WIDE.has(column) ? 3 : 1 }, (_, d) => {
    const cell = element("td", "number");
    cell.dataset.column = column;
    const content = make(d);
    if (content) cell.append(content);
    return cell;
  });
}

function buildHand() {
  const { heads, key, sum } = words();
  const texts = tokensByHand();
  const asking = texts[state.hand.query];
  Object.assign(byId("tokens"), { value: texts.join(" "), ariaInvalid: "false" });
  byId("query").replaceChildren(...texts.map((text, i) => Object.assign(element("option", "", text), { value: i })));
  buildChoice("mask", words().masks, (mask) => {
    if (mask === "own") state.hand.own = visibleByHand();
    changeHand({ mask });
  });
  const [before, , after] = words().asks(asking);
  byId("asks").replaceChildren(before, element("bdi", "token", asking), after, ...[0, 1, 2].map((d) => numberInput(`q-${d}`, "q", asking, d)));

  const columns = Object.keys(COLUMNS);
  const named = columns.map((column) => {
    const cell = Object.assign(header("col", heads[column]), { colSpan: WIDE.has(column) ? 3 : 1 });
    cell.dataset.column = column;
    return cell;
  });
  const cells = (make) => columns.flatMap((column) => cellsOf(column, (d) => make(column, d)));
  const rows = texts.map((text, i) => {
    const first = header("row");
    first.append(element("bdi", "token", text));
    return tableLine(first, ...cells((column, d) => {
      if (column === "k" || column === "v") return numberInput(`${column}-${i}-${d}`, column, text, d);
      if (column === "seen") return seenBox(i, text);
      return numberButton(column === "pv" ? `pv-${i}-${d}` : `${column}-${i}`);
    }));
  });
  const last = cells((column, d) => ({ e: () => numberButton("sum"), p: () => numberButton("psum"), pv: () => numberButton(`out-${d}`) })[column]?.());
  const [thead, tbody, tfoot] = byId("row").children;
  thead.replaceChildren(tableLine(header("col", key), ...named));
  tbody.replaceChildren(...rows);
  tfoot.replaceChildren(tableLine(header("row", sum), ...last));
  complain();
  showHand();
}

function seenBox(i, text) {
  const box = Object.assign(document.createElement("input"), { type: "checkbox", ariaLabel: words().seen_label(text) });
  box.dataset.id = `seen-${i}`;
  box.addEventListener("change", () => {
    const own = visibleByHand();
    own[i] = box.checked;
    changeHand({ mask: "own", own });
  });
  return box;
}

// --- draw, after every change

function showHand() {
  const { step } = state;
  const found = byHand();
  const visible = visibleByHand();
  byId("query").value = state.hand.query;
  setChoice(byId("mask"), state.hand.mask);
  const [text, more] = byId("step-words").children;
  text.textContent = words().step_of(step) + words().step_titles[step - 1];
  more.textContent = words().step_words[step - 1];
  byId("back").ariaDisabled = String(step === 1); // not disabled, to keep the focus
  byId("next").ariaDisabled = String(step === STEPS_BY_HAND);
  for (const [i, item] of [...byId("hand-steps").children].entries()) {
    const button = item.firstChild;
    button.ariaCurrent = i + 1 === step ? "step" : null;
    button.querySelector("span").textContent = words().steps[i];
  }
  for (const part of document.querySelectorAll("#formula [data-step]")) part.classList.toggle("on", Number(part.dataset.step) === step);
  for (const cell of document.querySelectorAll("#row [data-column]")) {
    const [from, until] = COLUMNS[cell.dataset.column];
    cell.hidden = step < from;
    cell.classList.toggle("past", step > until);
  }
  const [told, sources] = originOf(state.cell, found);
  for (const node of document.querySelectorAll("#hand [data-id]")) {
    const { id } = node.dataset;
    if (id.startsWith("seen")) node.checked = visible[id.split("-")[1]];
    else if (node.matches("input")) {
      if (node !== document.activeElement && node.ariaInvalid !== "true") node.value = valueOf(id, found);
    } else showNumber(node, valueOf(id, found));
    node.classList.toggle("source", sources.includes(id));
    if (node.matches("button")) node.ariaPressed = String(id === state.cell);
  }
  document.querySelector("#row tfoot tr").hidden = step < 5;
  const [, i] = state.cell.split("-");
  const token = /^(sum|psum|out)/.test(state.cell) ? [] : [" ", element("bdi", "token", tokensByHand()[i]), ":"];
  byId("origin").replaceChildren(element("span", "soft", words().origin), ...token, " ", told);
  writePlayAddress();
}

function showNumber(button, value) {
  button.textContent = tidy(value);
  button.dataset.value = value;
  if (button.dataset.id.startsWith("p-")) button.style.setProperty("--part", value);
}

// --- changes

// The number that a step explains until the reader clicks another.
function firstCell(step) {
  const name = NAMES_OF_STEPS[step - 1];
  return name === "sum" ? "sum" : `${name}-0`;
}

function goToStep(step) {
  state.step = clamp(step, 1, STEPS_BY_HAND);
  state.cell = firstCell(state.step);
  showHand();
}

function changeHand(changes) {
  Object.assign(state.hand, changes);
  if ("query" in changes || "tokens" in changes) buildHand();
  else showHand();
}

// Split at spaces. A text without spaces is cut into words if the browser can do so.
function cut(text) {
  const parts = text.trim().split(/\s+/u).filter(Boolean);
  if (parts.length !== 1 || !Intl.Segmenter) return parts;
  return Array.from(new Intl.Segmenter(state.lang, { granularity: "word" }).segment(parts[0]), ({ segment }) => segment);
}

function typeTokens() {
  const parts = cut(byId("tokens").value);
  const good = parts.length >= TOKENS.least && parts.length <= TOKENS.most;
  byId("tokens").ariaInvalid = String(!good);
  complain();
  if (!good || parts.join(" ") === tokensByHand().join(" ")) return;
  const { hand } = state;
  const draw = new Normal(7);
  const fresh = Array.from({ length: TOKENS.most }, () => ["q", "k", "v"].map(() => Array.from(draw.fill(new Float32Array(3)), (x) => Math.round(10 * x) / 10)));
  for (const [at, name] of ["q", "k", "v"].entries()) hand[name] = parts.map((_, i) => hand[name][i] ?? fresh[i][at]);
  hand.own = parts.map((_, i) => hand.own[i] ?? true);
  state.cell = firstCell(state.step); // the explained number may be gone
  changeHand({ tokens: parts, query: parts.length - 1 });
}

function startHand() {
  for (let step = 1; step <= STEPS_BY_HAND; step++) {
    const item = element("li");
    item.append(buildButton("", `${step} `, () => goToStep(step)));
    item.firstChild.append(element("span"));
    byId("hand-steps").append(item);
  }
  narrow.addEventListener("change", showHand);
  byId("back").addEventListener("click", () => goToStep(state.step - 1));
  byId("next").addEventListener("click", () => goToStep(state.step + 1));
  byId("tokens").addEventListener("change", typeTokens);
  byId("query").addEventListener("change", (event) => changeHand({ query: Number(event.target.value) }));
  byId("reset").addEventListener("click", () => {
    Object.assign(state, { hand: START(), step: 1, cell: firstCell(1) });
    buildHand();
  });
}
