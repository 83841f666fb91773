// What both pages share: elements, numbers as text, choices, languages, colours of the system, the address.

const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// An element with a class and a text; texts of users go nowhere but through textContent.
function element(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

// An element of a picture.
function shape(tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function buildButton(className, text, onClick) {
  const button = Object.assign(element("button", className, text), { type: "button" });
  button.addEventListener("click", onClick);
  return button;
}

// The header of a column ("col") or of a row ("row").
const header = (scope, text = "", className = "") => Object.assign(element("th", className, text), { scope });

function tableLine(...cells) {
  const row = element("tr");
  row.append(...cells);
  return row;
}

// With Ctrl, Alt or Meta, a key is the browser's.
const keyOf = (event) => (event.ctrlKey || event.altKey || event.metaKey ? "" : event.key);

// --- numbers as text

const fixed = (value, digits = 4) => (Number.isNaN(value) ? "NaN" : value.toFixed(digits).replace("-", "−"));
const known = (value, digits) => (Number.isNaN(value) ? "–" : fixed(value, digits));
const signed = (value, digits = 4) => (value > 0 ? "+" : "") + fixed(value, digits);
const short = (value) => (Math.abs(value) >= 1000 ? value.toExponential(1) : fixed(value, Math.abs(value) >= 100 ? 0 : 1));

// --- one of several, in the fieldset whose id is `name`

function buildChoice(name, options, onChange) {
  const fieldset = byId(name);
  fieldset.querySelector("div")?.remove(); // it may be built again
  const row = element("div");
  for (const [value, text] of Object.entries(options)) {
    const label = element("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name, value });
    input.addEventListener("change", () => onChange(value));
    label.append(input, element("span", "", text));
    row.append(label);
  }
  fieldset.append(row);
  fieldset.hidden = Object.keys(options).length < 2;
}

function setChoice(fieldset, value) {
  for (const input of fieldset.querySelectorAll("input")) input.checked = input.value === String(value);
}

// --- English or Chinese: `state.lang`. WORDS holds the words of both.

const systemLanguage = () => (navigator.language.startsWith("zh") ? "zh" : "en");

const words = () => WORDS[state.lang];

// Write the words of every element below `root` that names them: data-text its text, data-label its label for a screen reader.
function showWords(root = document) {
  for (const node of root.querySelectorAll("[data-text]")) node.textContent = words()[node.dataset.text];
  for (const node of root.querySelectorAll("[data-label]")) node.ariaLabel = words()[node.dataset.label];
}

// The language of the page, and the button that changes it.
function showLanguage() {
  document.documentElement.lang = state.lang === "zh" ? "zh-Hans" : "en";
  showWords();
  const [text, label] = words().language;
  Object.assign(byId("language"), { textContent: text, ariaLabel: `${text}: ${label}` });
}

const otherLanguage = () => (state.lang === "en" ? "zh" : "en");

// --- light and dark: `state.theme`, or what the system says; paper is light

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isPrinted = matchMedia("print");

const theme = () => (isPrinted.matches ? "light" : (state.theme ?? (systemIsDark.matches ? "dark" : "light")));

const onOtherColours = (show) => [systemIsDark, isPrinted].forEach((one) => one.addEventListener("change", show));

// The button that changes them.
function showTheme() {
  document.documentElement.dataset.theme = theme();
  const [text, label] = words().theme[theme() === "dark" ? "light" : "dark"];
  Object.assign(byId("theme"), { textContent: text, ariaLabel: label });
}

// --- the address holds what is shown; a frame in a notebook has none

const addressed = () => new URLSearchParams(location.hash.slice(1));

let later = null;

function putAddress(said) {
  clearTimeout(later);
  const address = `#${new URLSearchParams(said)}`;
  if (address === location.hash || location.protocol === "about:") return;
  try {
    history.replaceState(null, "", address);
  } catch {} // Safari takes 100 changes in 30 seconds; Chromium passes over what is too much for it
  if (address !== location.hash) later = setTimeout(putAddress, 1000, said);
}
