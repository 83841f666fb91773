// The page. The view is a function of `state`, and every change goes through `update`.

let views = []; // for each pane: { pane, node, map, lines }

const panes = () => (state.view === "both" ? ["a", "b"] : [state.view]);

function update(changes) {
  const cursorOnly = Object.keys(changes).every((name) => name === "q" || name === "k");
  Object.assign(state, changes);
  settle();
  writeAddress();
  if (cursorOnly) showCursor();
  else show();
}

function show() {
  showControls();
  showTally();
  showThumbs();
  showPanes();
  showCursor();
}

function showPanes() {
  const group = groupOf(state.layer);
  byId("look-title").textContent = words().look_title(GROUPS.length > 1 ? labelOf(group) : "", DATA.layers[state.layer].number, state.head);
  byId("core").textContent = DATA.layers[state.layer].name;
  if (views.map((view) => view.pane).join() !== panes().join()) buildPanes();
  const fields = panes().map((pane) => field(pane, state.layer, state.head));
  const top = topOf(fields);
  const isSigned = fields[0].signed;
  const [entropy, logit] = ["entropy", "logit"].map((name) => largest(fields.map((one) => largest(one[name]))));
  const tops = [isSigned ? entropy : 1, logit];
  drawLegend(byId("legend"), top, isSigned);
  views.forEach((view, i) => {
    view.node.querySelector("h3").replaceChildren(...paneTitle(view.pane));
    view.map.cells.ariaLabel = words().map_label(COMPARES ? words().views[view.pane] : "");
    view.map.show(fields[i], state.layer, top, tops);
    view.lines.show(state.layer);
  });
}

function buildPanes() {
  const template = byId("pane").content;
  byId("look").append(byId("row")); // below both maps, or below the only map
  byId("panes").replaceChildren();
  views = panes().map((pane) => {
    const node = template.cloneNode(true).firstElementChild;
    showWords(node);
    byId("panes").append(node);
    if (panes().length === 1) node.querySelector(".left").append(byId("row"));
    return { pane, node, map: new MapView(node, hover), lines: new LinesView(node, pane) };
  });
}

function paneTitle(pane) {
  const step = (trace) => {
    const found = TRACES[trace].snapshots[snapshotAt(trace, state.step)].step;
    return found === null ? "" : words().at_step(found.toLocaleString("en"));
  };
  const traces = pane === "diff" ? [0, 1] : [pane === "b" ? 1 : 0];
  return traces.flatMap((trace) => {
    const parts = [element("bdi", "", TRACES[trace].name), element("span", "soft", step(trace))];
    if (COMPARES) parts.unshift(element("b", "model", NAMES[trace]));
    return trace === traces.at(-1) ? parts : [...parts, element("span", "minus", "−")];
  });
}

// --- the cell in words: hovered, or with the cursor

function describe({ q, k }) {
  const [query, key] = [queriesOf(state.layer)[q], keysOf(state.layer)[k]];
  const S = DATA.layers[state.layer].shape[2];
  const told = panes().map((pane) => {
    const one = field(pane, state.layer, state.head);
    const at = q * S + k;
    if (!one.visible[at]) return { weight: words().hidden, more: words().hidden_why };
    if (one.signed) {
      const [a, b] = ["a", "b"].map((p) => fixed(field(p, state.layer, state.head).weights[at]));
      return { weight: signed(one.weights[at]), more: `A ${a}, B ${b}` };
    }
    const row = one.weights.subarray(q * S, (q + 1) * S);
    return { weight: fixed(one.weights[at]), more: [`${below(one.weights[at], largest(row))}`, ...rowFacts(one, q)].join(" · ") };
  });
  return { query, key, told };
}

const rowFacts = (one, q) => [words().entropy(known(one.entropy[q], 3)), words().logit(known(one.logit[q], 2))];

function below(weight, top) {
  if (!(weight >= 0)) return words().z_nan;
  if (weight === top) return words().z_largest;
  const digits = Math.max(Math.floor(Math.log10(weight * DATA.full)), 0); // a small weight has few exact digits
  const distance = weight > 0 ? fixed(Math.log(top / weight), Math.min(digits, 2)) : words().over(Math.floor(Math.log(top * DATA.full)));
  return words().z_below(distance);
}

function showReadout(cell) {
  const { query, key, told } = describe(cell);
  const pairs = told.map((one, i) => tellModel(element("span", "told"), one, told.length > 1 ? NAMES[i] : ""));
  const arrow = element("span", "soft", "→");
  const place = (name, i) => element("span", "soft", `${name} ${i}`);
  const { queries, keys } = DATA.layers[state.layer];
  const itself = queries === keys && cell.q === cell.k ? [element("span", "soft", words().itself)] : [];
  byId("readout").replaceChildren(place(words().query, cell.q), element("bdi", "token", query), arrow, place(words().key, cell.k), element("bdi", "token", key), ...itself, ...pairs);
  return { query, key, told };
}

function tellModel(node, { weight, more }, name) {
  node.append(...(name ? [element("b", "model", name), " "] : []), element("strong", "", weight), " ", element("span", "soft", more));
  return node;
}

function hover(cell, event) {
  const tip = byId("tip");
  tip.hidden = !cell;
  const at = cell ?? state;
  const { query, key, told } = showReadout(at);
  for (const { map } of views) map.point(at);
  if (!cell) return;
  const title = element("div", "soft");
  title.append(element("bdi", "token", query), " → ", element("bdi", "token", key));
  const rows = told.map((one, i) => tellModel(element("div", "told"), one, told.length > 1 ? NAMES[i] : ""));
  tip.replaceChildren(title, ...rows);
  const x = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8);
  const y = event.clientY + 20 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 20;
  tip.style.transform = `translate(${Math.max(x, 8)}px, ${Math.max(y, 8)}px)`;
}

function showCursor() {
  showReadout(state);
  showAnswers();
  for (const { map, lines } of views) {
    map.point(state);
    lines.point(state);
  }
  showRow();
}

// --- the cursor's row as a table

const ROWS_OF_TABLE = 8;

function showRow() {
  const { layer, head, q, view } = state;
  const S = DATA.layers[layer].shape[2];
  const columns = view === "both" || view === "diff" ? ["a", "b", "diff"] : [view];
  const all = columns.map((pane) => field(pane, layer, head));
  const rows = all.map((one) => ({ ...one, weights: one.weights.subarray(q * S, (q + 1) * S), visible: one.visible.subarray(q * S, (q + 1) * S) }));
  const ordering = ({ diff: [2], both: [0, 1] }[view] ?? [0]).map((i) => rows[i].weights);
  const size = (k) => Math.max(...ordering.map((weights) => (Number.isNaN(weights[k]) ? Infinity : Math.abs(weights[k]))));
  const seen = Array.from({ length: S }, (_, k) => k).filter((k) => rows.at(-1).visible[k]);
  const best = seen.toSorted((i, j) => size(j) - size(i) || i - j).slice(0, ROWS_OF_TABLE);
  const verb = words()[view === "diff" ? "differs_most" : "looks_most"];
  byId("row-title").replaceChildren(words().row_title(q), element("bdi", "token", queriesOf(layer)[q]), ` ${verb}`);
  const count = (i) => words().visible(rows[i].visible.reduce((sum, bit) => sum + bit, 0), S);
  const facts = all.filter((one) => !one.signed).map((one, i) => `${columns.length > 1 ? `${NAMES[i]}: ` : ""}${[count(i), ...rowFacts(one, q)].join(" · ")}`);
  byId("row-facts").textContent = facts.join(" · ");
  fillTable(columns, best, seen, rows.map((row) => row.weights));
  showPicture(rows.filter((row, i) => panes().includes(columns[i])), layer);
}

function fillTable(columns, best, seen, values) {
  const names = { a: COMPARES ? "A" : words().weight, b: COMPARES ? "B" : words().weight, diff: "A − B" };
  const say = (value, i) => element("td", "number", columns[i] === "diff" ? signed(value) : fixed(value));
  const top = tableLine(...[words().key, words().position, ...columns.map((pane) => names[pane])].map((text) => header("col", text)));
  document.querySelector("#row thead").replaceChildren(top);
  const rows = best.map((k) => {
    const token = header("row");
    token.append(element("bdi", "token", keysOf(state.layer)[k]));
    return tableLine(token, element("td", "number", String(k)), ...values.map((column, i) => say(column[k], i)));
  });
  const others = seen.filter((k) => !best.includes(k));
  if (others.length) {
    const sums = values.map((column) => others.reduce((sum, k) => sum + column[k], 0));
    rows.push(tableLine(header("row", words().others(others.length)), element("td"), ...sums.map(say)));
    rows.at(-1).className = "rest";
  }
  document.querySelector("#row tbody").replaceChildren(...rows);
}

// Keys that are patches, named "row,column": the row in the order of the image.
function showPicture(rows, layer) {
  const names = DATA.tokens[DATA.layers[layer].keys];
  const patches = names.flatMap((name, k) => (/^\d+,\d+$/.test(name) ? [k] : []));
  const [height, width] = patches.length ? names[patches.at(-1)].split(",").map((place) => +place + 1) : [0, 0];
  byId("picture").hidden = DATA.layers[layer].keys !== "pixel_values" || !patches.length;
  if (byId("picture").hidden) return;
  const top = topOf(rows);
  byId("picture").querySelector("div").replaceChildren(...rows.map((row) => {
    const canvas = element("canvas");
    paint(canvas, { ...row, weights: patches.map((k) => row.weights[k]), visible: patches.map((k) => row.visible[k]) }, height, width, top);
    return canvas;
  }));
}

// --- start

const READ = "minitx-viewer-read"; // stored by the browser after the first visit

// Whether this browser has not shown a page before. A frame in a notebook stores nothing.
function isFirstVisit() {
  try {
    const first = localStorage.getItem(READ) === null;
    localStorage.setItem(READ, "1");
    return first;
  } catch {
    return location.protocol !== "about:";
  }
}

buildControls();
readAddress();
byId("help").open = isFirstVisit();
byId("thumbs").addEventListener("keydown", moveAmongThumbs);
addEventListener("hashchange", () => {
  readAddress();
  show();
});
onOtherColours(show);
show();

let width = byId("panes").clientWidth;
new ResizeObserver(() => {
  if (byId("panes").clientWidth === width) return;
  width = byId("panes").clientWidth;
  show();
}).observe(byId("panes"));
