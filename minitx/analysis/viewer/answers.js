// The answers of the model above each map, and its answers without the head on the map.

// The answers at the current step: { axis, rows, without }, or nothing.
const answersOf = (trace) => TRACES[trace].snapshots[snapshotAt(trace, state.step)].answers;

// The number of the question in the cursor's row, or of the only question.
function asked(answers, layer) {
  if (!answers) return -1;
  const at = DATA.layers[layer].queries === answers.axis ? answers.rows.findIndex((one) => one.at === state.q) : -1;
  return at < 0 && answers.rows.length === 1 ? 0 : at;
}

// One answer: { right: whether the most probable answer is right, loss: -ln p of the right answer, top: [word, p] … }; null: not known.
const unpackAnswer = ([right, loss, top]) => ({ right, loss: loss === null ? null : Number(loss), top: top.map(([word, p]) => [word, Number(p)]) });

const tokenOf = (word) => element("bdi", "token", shown(DATA.words[word]));

function answerOf(trace, layer, head = null) {
  const answers = answersOf(trace);
  const i = asked(answers, layer);
  if (i < 0 || (head !== null && !answers.without)) return null;
  return unpackAnswer(head === null ? answers.rows[i].answer : answers.without[layer][head][i]);
}

// The increase of the loss of the right answer without a head, or NaN.
function effectOf(trace, layer, head) {
  const without = answerOf(trace, layer, head)?.loss ?? NaN;
  return without - (answerOf(trace, layer)?.loss ?? NaN);
}

const KNOWS_WITHOUT = TRACES.some((trace) => trace.snapshots.some((one) => one.answers?.without));

function showAnswers() {
  byId("out").hidden = !KNOWS_WITHOUT;
  byId("out").ariaPressed = String(state.out);
  for (const { pane, node, map } of views) {
    const traces = pane === "diff" ? [0, 1] : [pane === "b" ? 1 : 0];
    node.querySelector(".answer").replaceChildren(...traces.map((trace) => answerParts(trace, traces.length > 1)));
    map.want(wantedKey(traces[0]));
  }
  showEffects();
}

// The last row of a layer with a question whose right answer is known.
function lastAsked(layer) {
  const answers = answersOf(0);
  if (!answers || DATA.layers[layer].queries !== answers.axis) return null;
  return answers.rows.findLast((one) => one.right !== null)?.at ?? null;
}

// The key that holds the answer.
function wantedKey(trace) {
  const answers = answersOf(trace);
  const i = asked(answers, state.layer);
  return i < 0 || DATA.layers[state.layer].keys !== answers.axis ? null : answers.rows[i].key;
}

// The question and the answer in words. If the head is knocked out, also a table of both answers.
function answerParts(trace, isNamed) {
  const all = answerOf(trace, state.layer);
  const whole = element("div", "told-answer");
  if (!all) return whole;
  const row = answersOf(trace).rows[asked(answersOf(trace), state.layer)];
  const without = state.out ? answerOf(trace, state.layer, state.head) : null;
  const question = element("p", "asked");
  if (isNamed) question.append(element("b", "model", NAMES[trace]), " ");
  question.append(element("bdi", "", words().told(row.text).replace(/[^ ]+/g, shown)));
  if (row.right !== null) {
    question.append(" ", element("span", "soft", words().right), tokenOf(row.right));
    const key = wantedKey(trace);
    if (key !== null) question.append(" ", element("span", "soft", words().at_key), element("bdi", "soft", keysOf(state.layer)[key]));
  }
  const said = element("div", "said");
  said.append(question, verdict(all, words()[without ? "all_heads" : "says"]), ...reason(trace, all));
  whole.append(said);
  if (!without) return whole;
  said.append(verdict(without, words().without_head(state.head)));
  if (row.right !== null) {
    const change = `${fixed(all.loss, 2)} → ${fixed(without.loss, 2)} (${signed(without.loss - all.loss, 2)} nats)`;
    said.append(element("p", "soft", words().loss_change(change)));
  }
  whole.append(compareTops(all, without, row));
  return whole;
}

const SURE = 0.9; // from this weight on the right key on, a wrong answer is not the fault of the weights

// The reason why an answer is wrong, for a model in which a single head decides what is read.
function reason(trace, answer) {
  const key = wantedKey(trace);
  const [H, , S] = DATA.layers[state.layer].shape;
  if (key === null || answer.right !== false || DATA.layers.length * H > 1) return [];
  const { weights } = heads(trace, snapshotAt(trace, state.step), state.layer)[state.head];
  const row = weights.subarray(state.q * S, (state.q + 1) * S);
  if (row[key] < Math.max(...row)) return [element("p", "soft", words().wrong_key)];
  return row[key] < SURE ? [] : [element("p", "soft", words().found_key)];
}

function verdict(answer, says) {
  const [word, p] = answer.top[0];
  const isKnown = answer.right !== null;
  const line = element("p", isKnown ? (answer.right ? "verdict good" : "verdict bad") : "verdict");
  if (isKnown) line.append(element("b", "sign", words()[answer.right ? "is_right" : "is_wrong"]));
  line.append(says, tokenOf(word), words().probability(chance(p)));
  if (isKnown) line.append(element("span", "soft", words().right_answer(chance(Math.exp(-answer.loss)), fixed(answer.loss, 2))));
  return line;
}

// A probability. Very small ones are powers of ten.
function chance(p) {
  if (!(p < 0.005) || p === 0) return fixed(p, 2);
  const [digit, exponent] = p.toExponential(0).split("e-");
  return `${digit}·10⁻${[...exponent].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join("")}`;
}

// The most probable answers with and without the head.
function compareTops(all, without, row) {
  const table = element("table", "tops");
  const told = new Set([...all.top, ...without.top].map(([word]) => word));
  if (row.right !== null) told.add(row.right);
  const p = (one, word) => one.top.find(([other]) => other === word)?.[1];
  const say = (one, word) => {
    const found = p(one, word) ?? (word === row.right ? Math.exp(-one.loss) : undefined);
    const cell = element("td", "number", found === undefined ? "–" : chance(found));
    cell.style.setProperty("--p", found ?? 0);
    return cell;
  };
  const lines = [...told].map((word) => {
    const name = header("row");
    name.append(tokenOf(word), word === row.right ? " ✓" : "");
    const one = tableLine(name, say(all, word), say(without, word));
    if (word === row.right) one.className = "wanted";
    return one;
  });
  const [top, body] = [element("thead"), element("tbody")];
  top.append(tableLine(...words().tops(state.head).map((text) => header("col", text))));
  body.append(...lines);
  table.append(top, body);
  return table;
}

const rounded = (value) => signed(value, 1).replace(/^[+−](0\.0)$/, "$1");

const MOST = 5;

// Buttons for the heads whose removal increases the loss of the cursor's question most.
function showStrongest() {
  const trace = state.view === "b" ? 1 : 0;
  const { layers } = groupOf(state.layer);
  const all = layers.flatMap((layer) => Array.from({ length: DATA.layers[layer].shape[0] }, (_, head) => ({ layer, head, effect: effectOf(trace, layer, head) })));
  const best = all.filter((one) => one.effect > 0.05).sort((a, b) => b.effect - a.effect).slice(0, MOST);
  byId("strongest").hidden = !best.length;
  byId("strongest").replaceChildren(element("span", "soft", words().strongest(NAMES[trace])), ...best.map(({ layer, head, effect }) => buildButton("", `L${DATA.layers[layer].number} h${head} ${rounded(effect)}`, () => update({ layer, head }))));
}

// Below each thumbnail: the increase of the loss of the cursor's question without the head.
function showEffects() {
  const traces = state.view === "b" ? [1] : state.view === "a" || !COMPARES ? [0] : [0, 1];
  if (KNOWS_WITHOUT) showStrongest();
  for (const button of byId("thumbs").querySelectorAll("button")) {
    const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
    const effects = KNOWS_WITHOUT ? traces.map((trace) => effectOf(trace, layer, head)) : [];
    const known = effects.filter((value) => !Number.isNaN(value));
    let line = button.querySelector(".effect");
    if (!known.length) {
      line?.remove();
      continue;
    }
    if (!line) button.append((line = element("span", "numbers effect")));
    const say = (value, unknown) => (Number.isNaN(value) ? unknown : rounded(value));
    line.textContent = `Δ ${effects.map((value) => say(value, "–")).join(" | ")}`;
    line.classList.toggle("strong", Math.max(...known.map(Math.abs)) >= 0.5);
    button.ariaLabel = button.dataset.label + words().effect_label(effects.map((value) => say(value, null)));
  }
}
