// Colours of numbers. The ramps are in ramps.js.

// Okabe and Ito 2008, with a darker and a lighter colour instead of yellow and black.
const HEADS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b0478c", "#3a9bd9", "#b87a00", "#5b616b", "#7a5cc4"],
  dark: ["#56b4e9", "#f08a3c", "#2cc79b", "#e39ac6", "#9fd4f5", "#f0c04a", "#b4bac4", "#b7a2f2"],
};
const STEPS_OF_RAMP = 256;
const headColour = (head) => HEADS[theme()][head % HEADS.light.length];

const tables = new Map();

// The ramp as 256 pixels of a canvas.
function table(isSigned) {
  const name = theme() + isSigned;
  if (!tables.has(name)) {
    const ramp = RAMPS[theme()][isSigned ? "signed" : "weights"];
    const pixel = ([r, g, b]) => (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
    const all = Array.from({ length: STEPS_OF_RAMP }, (_, i) => pixel(mix(ramp, i / (STEPS_OF_RAMP - 1))));
    tables.set(name, Uint32Array.from(all));
  }
  return tables.get(name);
}

// The place of |value| between no colour (0) and the full colour (1).
function strength(value, top) {
  const t = Math.min(Math.abs(value) / (top || 1), 1);
  return state.scale === "root" ? Math.sqrt(t) : t;
}

const topOf = (fields) => (state.scale === "largest" ? largest(fields.map((f) => largest(f.weights))) || 1 : 1);

// One pixel per cell. Hidden cells are transparent, so the hatching behind them is visible.
function paint(canvas, { weights, visible, signed: isSigned }, L, S, top) {
  canvas.width = S;
  canvas.height = L;
  const context = canvas.getContext("2d");
  const image = context.createImageData(S, L);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = table(isSigned);
  const last = STEPS_OF_RAMP - 1;
  const nan = theme() === "dark" ? 0xff3d3dd0 : 0xff2020b0; // red, which is in no ramp
  for (let i = 0; i < weights.length; i++) {
    if (!visible[i]) continue;
    const t = strength(weights[i], top);
    const at = isSigned ? (1 + Math.sign(weights[i]) * t) / 2 : t;
    pixels[i] = Number.isNaN(at) ? nan : colours[Math.round(at * last)];
  }
  context.putImageData(image, 0, 0);
}

// One bar per row, one pixel high and WIDTH wide. Signed bars start in the middle.
const BAR = 40;

function paintBars(canvas, values, top, isSigned) {
  canvas.width = BAR;
  canvas.height = values.length;
  const context = canvas.getContext("2d");
  const [less, more] = [mix(RAMPS[theme()].signed, 1 / 6), mix(RAMPS[theme()].signed, 5 / 6)];
  values.forEach((value, row) => {
    if (Number.isNaN(value)) return;
    const length = Math.min(Math.abs(value) / (top || 1), 1) * (isSigned ? BAR / 2 : BAR);
    context.fillStyle = isSigned ? `rgb(${value > 0 ? more : less})` : getComputedStyle(canvas).color;
    context.fillRect(isSigned ? BAR / 2 - (value < 0 ? length : 0) : 0, row, length, 1);
  });
}

function drawLegend(node, top, isSigned) {
  const ramp = document.createElement("canvas");
  const colours = table(isSigned);
  ramp.width = STEPS_OF_RAMP;
  ramp.height = 1;
  const image = ramp.getContext("2d").createImageData(STEPS_OF_RAMP, 1);
  new Uint32Array(image.data.buffer).set(colours);
  ramp.getContext("2d").putImageData(image, 0, 0);
  const parts = isSigned ? [-1, -0.25, 0, 0.25, 1] : state.scale === "root" ? [0, 0.01, 0.1, 0.25, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const ticks = parts.map((part) => {
    const t = strength(part * top, top) * Math.sign(part);
    const value = Number((part * top).toPrecision(2));
    const tick = element("span", "tick", `${isSigned && value > 0 ? "+" : ""}${value}`.replaceAll("-", "−"));
    tick.style.left = `${100 * (isSigned ? (1 + t) / 2 : t)}%`;
    return tick;
  });
  const scale = element("span", "ramp");
  scale.append(ramp, ...ticks);
  node.replaceChildren(...(isSigned ? [element("span", "end", words().more_in[0]), scale, element("span", "end", words().more_in[1])] : [scale]));
  node.ariaLabel = isSigned ? words().legend_diff : words().legend(Number(top.toPrecision(2)));
}
