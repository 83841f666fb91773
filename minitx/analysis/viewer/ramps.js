// Ramps: the colours of weights and of differences, used by both pages.

// mako (Waskom, seaborn): the lightness falls evenly, and 0 has the colour of the page.
const MAKO = ["#0b0405", "#2e1e3c", "#413d7b", "#37659e", "#348fa7", "#40b7ad", "#8ad9b1", "#def5e5"];
const RAMPS = {
  light: { weights: ["#ffffff", ...MAKO.toReversed()], signed: ["#0a3161", "#2a78b8", "#9ccbe6", "#ffffff", "#fbc191", "#d5630f", "#6e2503"] },
  dark: { weights: ["#15171b", ...MAKO.slice(1)], signed: ["#d4ebff", "#5aa9e6", "#1f4e79", "#15171b", "#74350e", "#ec8a45", "#ffe6d1"] },
};

const parse = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

function mix(ramp, t) {
  const at = Math.min(Math.max(t, 0), 1) * (ramp.length - 1);
  const i = Math.min(Math.floor(at), ramp.length - 2);
  const [low, high] = [parse(ramp[i]), parse(ramp[i + 1])];
  return low.map((c, j) => Math.round(c + (at - i) * (high[j] - c)));
}
