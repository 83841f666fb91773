// The playground: language, scenes, questions, and the address that describes the view.

const SCENES = ["hand", "width", "training", "traps"];

// step: of scene 1, from 1. cell: the number that scene 1 explains. width, keys, own: exponents of 2 of d_k, n and the
// reader's own factor. optimizer, rate (0 to 2), at: the setting of scene 3 and its current step. theme: null: as the system.
const state = {
  lang: systemLanguage(),
  theme: null,
  scene: 1,
  hand: START(),
  step: 1,
  cell: "dot-0",
  width: 6,
  keys: 6,
  factor: "inv_sqrt",
  own: -3,
  half: "none",
  seed: 0,
  optimizer: "adamw",
  rate: 0,
  at: 0,
};

// The parameters of an address, and their valid values.
const range = (low, high, step = 1) => (text) => (/^-?\d+(\.\d+)?$/.test(text) && Number(text) >= low && Number(text) <= high && Number(text) % step === 0 ? Number(text) : undefined);
const among = (...options) => (text) => (options.includes(text) ? text : undefined);
const ADDRESSED = {
  lang: among("en", "zh"),
  theme: among("light", "dark"),
  scene: range(1, SCENES.length),
  step: range(1, STEPS_BY_HAND),
  width: range(0, 10),
  keys: range(2, 8),
  factor: among(...Object.keys(FACTORS), "own"),
  own: range(-10, 3, 0.25),
  half: among("none", "half"),
  seed: range(0, 9999),
  optimizer: among(...OPTIMIZERS),
  rate: range(0, 2),
  at: (text) => TRAINING.looks.find((step) => String(step) === text),
};
const IN_SCENE = { 1: ["step"], 2: ["width", "keys", "factor", "own", "half", "seed"], 3: ["optimizer", "rate", "at"], 4: [] };

function readPlayAddress() {
  for (const [name, text] of addressed()) {
    const value = ADDRESSED[name]?.(text);
    if (value !== undefined) state[name] = value;
  }
}

function writePlayAddress() {
  const names = ["lang", "scene", ...IN_SCENE[state.scene].filter((name) => name !== "own" || state.factor === "own")];
  if (state.theme) names.push("theme");
  putAddress(Object.fromEntries(names.map((name) => [name, state[name]])));
}

// --- language, colours, scenes

function showPlay() {
  document.title = words().title;
  showLanguage();
  showTheme();
  buildHand();
  buildWidth();
  buildTraining();
  buildTraps();
  for (const scene of Object.keys(QUESTIONS)) buildQuiz(scene);
  showScene();
}

function showScene() {
  SCENES.forEach((name, i) => {
    const isOpen = state.scene === i + 1;
    byId(name).hidden = !isOpen;
    Object.assign(byId(`tab-${name}`), { ariaSelected: String(isOpen), tabIndex: isOpen ? 0 : -1 });
  });
  if (state.scene === 2) countAgain();
  if (state.scene === 3) showTraining();
  else stopPlaying();
  writePlayAddress();
}

function openScene(scene) {
  state.scene = scene;
  showScene();
  byId(`tab-${SCENES[scene - 1]}`).focus();
}

// --- two questions at the end of each scene: predict, then look

const largestWeight = () => Math.max(...byHand().weights);

// For each question: the right answer, and the function that shows it. It returns the values for the texts.
const QUESTIONS = {
  hand: [
    {
      right: 1,
      look() {
        const { hand } = state;
        const before = tidy(largestWeight());
        hand.q[hand.query] = hand.q[hand.query].map((x) => 2 * x);
        goToStep(6);
        return { before, after: tidy(largestWeight()) };
      },
    },
    {
      right: 2,
      look() {
        if (visibleByHand().filter(Boolean).length < 2) state.hand.mask = "none";
        const largest = largestWeight();
        const own = visibleByHand();
        own[byHand().weights.indexOf(largest)] = false;
        changeHand({ mask: "own", own });
        goToStep(6);
        const before = tidy(largest);
        return { before, after: Number(before) < 1 ? tidy(1 / (1 - largest)) : null };
      },
    },
  ],
  width: [
    { right: 2, look: () => showDraws({ width: 9, keys: 6, factor: "unscaled", half: "none", seed: 0 }) },
    { right: 1, look: () => showDraws({ width: 9, keys: 6, factor: "unscaled", half: "none", seed: 0 }) },
  ],
  training: [
    {
      right: 2,
      look() {
        openSetting({ optimizer: "sgd", rate: 1, at: 20 });
        const [scaled, unscaled] = setting();
        return { scaled: digits(scaled.largest[lookNow()]), unscaled: digits(unscaled.largest[lookNow()]), accuracy: percent(outcome(unscaled).lowest) };
      },
    },
    {
      right: 1,
      look() {
        byId("widths").open = true;
        const [narrow, wide] = [0, 3].map((i) => OPTIMIZERS.map((name) => TRAINING.limits[name][i][3].toPrecision(2)));
        return { narrow, wide };
      },
    },
  ],
};
const picks = {}; // "hand-0": { picked, numbers }, with numbers after the reader has looked

function showDraws(settings) {
  Object.assign(state, settings);
  showWidth();
  return {};
}

function buildQuiz(scene) {
  const quiz = document.querySelector(`#${scene} .quiz`);
  const forms = QUESTIONS[scene].map((question, i) => buildQuestion(scene, i, question));
  quiz.replaceChildren(element("h2", "", words().quiz), ...forms);
}

function buildQuestion(scene, i, question) {
  const name = `${scene}-${i}`;
  const { ask, options, tell } = words().questions[scene][i];
  const mine = (picks[name] ??= { picked: null, numbers: null });
  const field = element("fieldset", "question");
  const answer = Object.assign(element("p", "answer"), { role: "status" });
  const look = buildButton("main", words().look, () => {
    if (mine.picked === null) answer.textContent = words().pick;
    else {
      mine.numbers = question.look();
      show();
    }
  });
  const show = () => {
    look.disabled = mine.numbers !== null;
    for (const input of field.querySelectorAll("input")) input.disabled = mine.numbers !== null;
    if (mine.numbers === null) return;
    const isRight = mine.picked === question.right;
    answer.replaceChildren(element("strong", isRight ? "right" : "wrong", words()[isRight ? "right" : "wrong"]), " ", tell(mine.numbers));
  };
  field.append(element("legend", "", ask));
  options.forEach((text, number) => {
    const label = element("label", "check");
    const input = Object.assign(document.createElement("input"), { type: "radio", name, value: number, checked: mine.picked === number });
    input.addEventListener("change", () => {
      mine.picked = number;
      answer.textContent = "";
    });
    label.append(input, element("span", "", text));
    field.append(label);
  });
  field.append(look, answer);
  show();
  return field;
}

// --- start

startHand();
startWidth();
startTraining();
readPlayAddress();
openSetting({ at: state.at });
state.cell = firstCell(state.step);
byId("language").addEventListener("click", () => {
  state.lang = otherLanguage();
  showPlay();
});
byId("theme").addEventListener("click", () => {
  state.theme = theme() === "dark" ? "light" : "dark";
  showTheme();
  writePlayAddress();
});
SCENES.forEach((name, i) => byId(`tab-${name}`).addEventListener("click", () => openScene(i + 1)));
byId("scenes").addEventListener("keydown", (event) => {
  const to = { ArrowLeft: state.scene - 1, ArrowRight: state.scene + 1, Home: 1, End: SCENES.length }[keyOf(event)];
  if (to === undefined) return;
  event.preventDefault();
  openScene(clamp(to, 1, SCENES.length));
});
addEventListener("hashchange", () => {
  readPlayAddress();
  goToStep(state.step);
  openSetting({ at: state.at });
  showPlay();
});
onOtherColours(() => showTheme());
showPlay();
