// The whole batch: at each step, the share of right answers, and the share of questions whose largest weight lies on the right key.

const PLOT = { width: 340, height: 96, left: 32, right: 332, top: 8, bottom: 74 };

const tallies = TRACES.map((trace) => trace.snapshots.map((one) => one.tally));
const COUNTS = tallies.flat().every((one) => one && one.rows > 1) ? tallies : null;

function showTally() {
  byId("tally").hidden = !COUNTS;
  if (!COUNTS) return;
  const { row, rows } = COUNTS[0][0];
  const onKey = (one) => (one.on_key[state.layer].length ? one.on_key[state.layer][state.head] / one.keyed : null);
  const measures = [["accuracy", (one) => one.right / one.asked]];
  if (COUNTS.flat().every((one) => onKey(one) !== null)) measures.push(["on_key", onKey]);
  const pictures = measures.map(([name, measure]) => drawShares(words()[name](rows), COUNTS.map((counts) => counts.map(measure))));
  byId("tally").querySelector(".curves").replaceChildren(...pictures);
  byId("tally").querySelector(".note").textContent = words().row_of(row, rows, words().rules[DATA.rule]);
}

// One curve per model, up to the current step. `shares`: for each model, one number per snapshot.
function drawShares(title, shares) {
  const { width, height, left, right, top, bottom } = PLOT;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const [first, last] = [STEPS[0] ?? 0, STEPS.at(-1) ?? 0];
  const x = (step) => left + ((right - left) * (step - first)) / (last - first || 1);
  const y = (share) => bottom - (bottom - top) * share;
  for (const share of [0, 0.5, 1]) svg.append(shape("line", { class: "axis", x1: left, x2: right, y1: y(share), y2: y(share) }), shape("text", { x: 0, y: y(share) + 4 }, `${100 * share} %`));
  for (const step of [first, last]) svg.append(shape("text", { x: x(step), y: bottom + 16, "text-anchor": step === last ? "end" : "start" }, String(step)));
  const told = shares.map((values, trace) => {
    const now = snapshotAt(trace, state.step);
    const points = values.slice(0, now + 1).map((share, i) => [x(TRACES[trace].snapshots[i].step ?? 0), y(share)].map((at) => fixed(at, 1)).join());
    const colour = `model-${trace}`;
    svg.append(shape("polyline", { class: `curve ${colour}`, points: points.join(" ") }));
    const [cx, cy] = points.at(-1).split(",");
    svg.append(shape("circle", { class: `dot ${colour}`, cx, cy, r: 3.5 }));
    return [trace, `${fixed(100 * values[now], 1)} %`];
  });
  const figure = element("figure");
  const caption = element("figcaption", "", title);
  caption.append(...told.flatMap(([trace, text]) => {
    const value = element("b", `model-${trace}`, `${NAMES[trace]} ${text}`.trim());
    return [" ", value];
  }));
  svg.ariaLabel = words().curve_label(title, told.map(([trace, text]) => `${NAMES[trace]} ${text}`.trim()).join(", "));
  figure.append(caption, svg);
  return figure;
}
