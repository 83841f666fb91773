// Shared by both pages: elements, numbers as text, choices, languages, system colours, and the address.

const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// An element with a class and a text. Texts of users are only set through textContent.
function element(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

// An SVG element.
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

// With Ctrl, Alt or Meta, the browser handles the key.
const keyOf = (event) => (event.ctrlKey || event.altKey || event.metaKey ? "" : event.key);

// --- numbers as text

const fixed = (value, digits = 4) => (Number.isNaN(value) ? "NaN" : value.toFixed(digits).replace("-", "−"));
const known = (value, digits) => (Number.isNaN(value) ? "–" : fixed(value, digits));
const signed = (value, digits = 4) => (value > 0 ? "+" : "") + fixed(value, digits);
const short = (value) => (Math.abs(value) >= 1000 ? value.toExponential(1) : fixed(value, Math.abs(value) >= 100 ? 0 : 1));

// --- a choice, in the fieldset with the id `name`

function buildChoice(name, options, onChange) {
  const fieldset = byId(name);
  fieldset.querySelector("div")?.remove(); // it may have been built before
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

// --- English or Chinese: `state.lang`. WORDS has the texts of both.

const systemLanguage = () => (navigator.language.startsWith("zh") ? "zh" : "en");

const words = () => WORDS[state.lang];

// Set the text (data-text) and the label for screen readers (data-label) of each element below `root` that has these attributes.
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

// --- light and dark: `state.theme`, or the setting of the system. Print is light.

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

// --- the address describes the view. A frame in a notebook has no address.

const addressed = () => new URLSearchParams(location.hash.slice(1));

let later = null;

function putAddress(said) {
  clearTimeout(later);
  const address = `#${new URLSearchParams(said)}`;
  if (address === location.hash || location.protocol === "about:") return;
  try {
    history.replaceState(null, "", address);
  } catch {} // Safari allows 100 changes in 30 seconds; Chromium ignores further ones
  if (address !== location.hash) later = setTimeout(putAddress, 1000, said);
}
