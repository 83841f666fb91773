// Scene 3: a solved model, trained further with and without the scale, as examples/falls_apart.py recorded it.

const TRAINING = JSON.parse(byId("training-data").textContent);
const OPTIMIZERS = ["adamw", "sgd"];
const ARMS = ["inv_sqrt", "unscaled"];
const NUM_QUESTIONS = 16; // the rows of the map: a key each, and in the last column the question itself
const WINDOW = 8; // steps of 64 answers, as in the grid `limits`
const HOLDS = 0.9;
const PACE = 130; // milliseconds from one measurement to the next
const LEVELS = Object.fromEntries(Array.from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", (letter, i) => [letter, i / 63]));

const ratesOf = (optimizer) => [...new Set(TRAINING.runs.filter((run) => run.optimizer === optimizer).map((run) => run.rate))];
const settingOf = (optimizer, rate) => ARMS.map((arm) => TRAINING.runs.find((run) => run.optimizer === optimizer && run.rate === ratesOf(optimizer)[rate] && run.arm === arm));
const setting = () => settingOf(state.optimizer, state.rate);
const nameOfSetting = () => `${state.optimizer}-${state.rate}`;
const lastLook = TRAINING.looks.length - 1;
const lookNow = () => TRAINING.looks.indexOf(state.at);

// For each setting: the reader's prediction, and whether the curves are open and were seen to the end.
const predicted = {};
const mine = () => (predicted[nameOfSetting()] ??= { picked: null, isOpen: false, isSeen: false });

// The mean accuracy of the last WINDOW batches of 64 up to a step.
function accuracyAt(run, step) {
  const counts = run.accuracy.slice(Math.max(0, step - WINDOW + 1), step + 1);
  return total(counts) / (64 * counts.length);
}

// The summary of a run: whether it stays stable, its lowest accuracy over WINDOW steps, the step of the collapse, and the final accuracy.
function outcome(run) {
  const means = run.accuracy.map((_, step) => accuracyAt(run, step)).slice(WINDOW - 1);
  const first = means.findIndex((mean) => mean < HOLDS);
  return { holds: first < 0, lowest: Math.min(...means), first: first < 0 ? null : first + WINDOW - 1, end: means.at(-1) };
}

// 0: both hold, 1: only the copy with the scale holds, 2: both fall apart.
const whatHappened = (runs) => runs.filter((run) => !outcome(run).holds).length;

const percent = (share) => `${fixed(100 * share, 1).replace(/\.0$/, "")} %`;

// --- pictures

// The colours of a level from 0 to 1. The style chooses between light and dark.
const fillOf = (level) => `light-dark(${["light", "dark"].map((name) => `rgb(${mix(RAMPS[name].weights, level)})`)})`;

// Rows are questions, columns are keys. A frame marks the requested key, and a sign after the row shows whether the answer is right.
function drawMap(svg, run, look) {
  const levels = Array.from(run.weights[look], (letter) => LEVELS[letter]);
  const width = levels.length / NUM_QUESTIONS;
  const parts = levels.map((level, i) => shape("rect", { class: "weight", x: i % width, y: Math.floor(i / width), width: 1, height: 1, fill: fillOf(level) }));
  parts.push(shape("rect", { class: "border", x: 0, y: 0, width, height: NUM_QUESTIONS }));
  Array.from(run.right[look], (isRight, i) => {
    parts.push(shape("rect", { class: "asked", x: i + 0.06, y: i + 0.06, width: 0.88, height: 0.88 }));
    parts.push(shape("text", { class: isRight === "1" ? "right" : "wrong", x: width + 0.75, y: i + 0.82, "text-anchor": "middle" }, isRight === "1" ? "✓" : "✗"));
  });
  svg.replaceChildren(...parts);
  const found = levels.filter((_, i) => i % width === Math.floor(i / width)).filter((level, i) => level === Math.max(...levels.slice(i * width, (i + 1) * width))).length;
  svg.ariaLabel = words().map_label(TRAINING.looks[look], found, total(Array.from(run.right[look], Number)));
}

// The legend: 64 levels, with ticks at √p.
function drawRamp(svg) {
  const parts = Array.from({ length: 64 }, (_, i) => shape("rect", { x: 5 + 3 * i, y: 0, width: 3.1, height: 10, fill: fillOf(i / 63) }));
  parts.push(shape("rect", { class: "border", x: 5, y: 0, width: 192, height: 10 }));
  for (const p of [0, 0.05, 0.25, 0.5, 1]) parts.push(shape("text", { x: 5 + 192 * Math.sqrt(p), y: 24, "text-anchor": "middle" }, String(p)));
  svg.replaceChildren(...parts);
}

function drawCurves(svg, values, { top, ticks, line, label }) {
  const { left, right, top: ceiling, bottom } = FRAME;
  const start = left + 40;
  const x = (step) => start + ((right - start) * step) / TRAINING.looks.at(-1);
  const y = (value) => bottom - ((bottom - ceiling) * clamp(value, 0, top)) / top;
  const parts = ticks.flatMap(([value, text]) => [shape("line", { class: "axis", x1: start, x2: right, y1: y(value), y2: y(value) }), shape("text", { x: left, y: y(value) + 4 }, text)]);
  parts.push(shape("line", { class: "mark", x1: start, x2: right, y1: y(line), y2: y(line) }));
  for (const step of [0, 50, 100, 150, 200]) parts.push(shape("text", { x: x(step), y: bottom + 18, "text-anchor": step === 200 ? "end" : "middle" }, String(step)));
  values.forEach((curve, i) => {
    const points = curve.slice(0, state.at + 1).map((value, step) => `${fixed(x(step), 1)},${fixed(y(value), 1)}`);
    parts.push(shape("polyline", { class: `curve ${ARMS[i]}`, points: points.join(" ") }));
    parts.push(shape("circle", { class: `dot ${ARMS[i]}`, cx: x(state.at), cy: y(curve[state.at]), r: 4 }));
  });
  svg.replaceChildren(...parts);
  svg.ariaLabel = label;
}

// --- draw

function showTraining() {
  const runs = setting();
  const look = lookNow();
  const { isOpen, isSeen, picked } = mine();
  const isAtEnd = look === lastLook;
  setChoice(byId("optimizer"), state.optimizer);
  setChoice(byId("rate"), state.rate);
  for (const input of byId("predict").querySelectorAll("input")) Object.assign(input, { checked: picked === Number(input.value), disabled: isOpen && (picked === null || isSeen || state.at > 0) });
  for (const id of ["play", "at"]) byId(id).disabled = !isOpen;
  byId("play").textContent = words()[playing ? "pause" : isAtEnd ? "again" : "play"];
  Object.assign(byId("at"), { value: look, ariaValueText: words().step_now(state.at) });
  document.querySelector("output[for=at]").textContent = words().step_now(state.at);
  ARMS.forEach((arm, i) => drawMap(byId(`map-${arm}`), runs[i], look));
  drawRamp(byId("ramp"));
  const means = runs.map((run) => run.accuracy.map((_, step) => accuracyAt(run, step)));
  const { accuracy_label: accuracyLabel, loss_label: lossLabel } = words();
  drawCurves(byId("accuracy"), means, { top: 1, ticks: [[0, "0"], [0.5, "50 %"], [1, "100 %"]], line: HOLDS, label: accuracyLabel(...means.map((curve) => percent(curve[state.at]))) });
  const highest = Math.max(3.5, ...runs.flatMap((run) => run.loss));
  const ticks = [0, 0.5, 1].map((part) => [part * highest, fixed(part * highest, 1)]);
  drawCurves(byId("loss"), runs.map((run) => run.loss), { top: highest, ticks, line: Math.log(NUM_QUESTIONS), label: lossLabel(...runs.map((run) => fixed(run.loss[state.at]))) });
  showNumbers(runs, look);
  showWhy();
  showTold(runs);
  showSeen();
  writePlayAddress();
}

function showNumbers(runs, look) {
  const { numbers } = words();
  const names = { ...numbers, accuracy: numbers.accuracy(Math.min(WINDOW, state.at + 1)) };
  const values = {
    accuracy: runs.map((run) => percent(accuracyAt(run, state.at))),
    loss: runs.map((run) => fixed(run.loss[state.at])),
    largest: runs.map((run) => run.largest[look].toLocaleString("en", { maximumSignificantDigits: 3 })),
  };
  document.querySelector("#numbers tbody").replaceChildren(...Object.entries(values).map(([name, texts]) => tableRow(names[name], texts, name)));
  showHeads("numbers", [words().step_now(state.at), ...ARMS.map((arm) => words().arms[arm])]);
}

function showHeads(table, texts) {
  byId(table).tHead.replaceChildren(tableLine(...texts.map((text, i) => header("col", text, i ? "number" : ""))));
}

function tableRow(first, texts, name = "") {
  const row = tableLine(header("row", first), ...texts.map((text) => element("td", "number", text)));
  row.dataset.name = name;
  return row;
}

function showTold(runs) {
  const { isOpen, isSeen, picked } = mine();
  const node = byId("told");
  const happened = whatHappened(runs);
  const told = () => {
    const all = words().happened[happened](...runs.map((run) => outcome(run)).map(({ holds, lowest, first, end }) => ({ holds, first, lowest: percent(lowest), end: percent(end) })));
    if (picked === null) return [all];
    const isRight = picked === happened;
    return [element("strong", isRight ? "right" : "wrong", words()[isRight ? "right" : "wrong"]), " ", all];
  };
  const now = isSeen ? told() : [words()[isOpen ? "playing_now" : "predict_first"]];
  const text = now.map((part) => part.textContent ?? part).join("");
  if (node.textContent !== text) node.replaceChildren(...now); // screen readers read it, so it does not change with each step
  node.classList.toggle("beyond", isSeen && happened > 0);
}

// The explanation contains the answer, so it appears after the reader has predicted and seen a training to its end.
function showWhy() {
  const why = byId("why");
  const isTold = Object.values(predicted).some(({ picked, isSeen }) => picked !== null && isSeen);
  if (isTold && why.hidden) why.open = true;
  why.hidden = !isTold;
}

// All settings: the results that the reader has seen, and "?" for the others.
function showSeen() {
  const { outcomes, optimizers, arms, setting_head: settingHead } = words();
  showHeads("seen", [settingHead, ...ARMS.map((arm) => arms[arm])]);
  const rows = OPTIMIZERS.flatMap((optimizer) => ratesOf(optimizer).map((rate, i) => {
    const name = `${optimizer}-${i}`;
    const found = settingOf(optimizer, i).map(outcome);
    const row = tableRow(`${optimizers[optimizer]}, ${rate}`, found.map(({ holds, lowest }) => (predicted[name]?.isSeen ? outcomes(holds, percent(lowest)) : "?")), name);
    row.classList.toggle("chosen", name === nameOfSetting());
    if (predicted[name]?.isSeen) found.forEach(({ holds }, arm) => row.children[arm + 1].classList.add(holds ? "right" : "wrong"));
    return row;
  }));
  document.querySelector("#seen tbody").replaceChildren(...rows);
}

function buildTraining() {
  const { optimizers, predictions, limit_heads: limitHeads } = words();
  buildChoice("optimizer", optimizers, (optimizer) => openSetting({ optimizer }));
  buildRates();
  buildChoice("predict", predictions, (picked) => {
    Object.assign(mine(), { picked: Number(picked), isOpen: true });
    showTraining();
  });
  const limits = TRAINING.limits;
  showHeads("limits", limitHeads);
  document.querySelector("#limits tbody").replaceChildren(...limits.adamw.map(([width], i) => tableRow(String(width), OPTIMIZERS.flatMap((name) => limits[name][i].slice(1, 4)).map((x) => x.toPrecision(2)), String(width))));
  showTraining();
}

function buildRates() {
  buildChoice("rate", Object.fromEntries(ratesOf(state.optimizer).map((rate, i) => [i, String(rate)])), (rate) => openSetting({ rate: Number(rate) }));
}

// --- changes

let playing = null;

function stopPlaying() {
  clearInterval(playing);
  playing = null;
}

function openSetting(changes) {
  stopPlaying();
  const other = "optimizer" in changes && changes.optimizer !== state.optimizer;
  Object.assign(state, { at: 0, ...changes });
  if (other) buildRates();
  if (state.at > 0) mine().isOpen = true; // opened by an address or a question
  if (lookNow() === lastLook) mine().isSeen = true;
  showTraining();
}

function goToLook(look) {
  state.at = TRAINING.looks[clamp(look, 0, lastLook)];
  if (look >= lastLook) {
    mine().isSeen = true;
    stopPlaying();
  }
  showTraining();
}

function play() {
  if (playing) {
    stopPlaying();
    showTraining();
    return;
  }
  playing = setInterval(() => goToLook(lookNow() + 1), PACE);
  goToLook(lookNow() === lastLook ? 0 : lookNow() + 1);
}

function startTraining() {
  byId("at").max = lastLook;
  byId("play").addEventListener("click", play);
  byId("at").addEventListener("input", (event) => {
    stopPlaying();
    goToLook(Number(event.target.value));
  });
}
