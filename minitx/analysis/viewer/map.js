// A large map of one head: tokens on both axes, a cell with the cursor, and entropy and the largest score next to each row.

const measure = document.createElement("canvas").getContext("2d");

function widest(texts, font) {
  measure.font = font;
  return Math.max(...texts.map((text) => measure.measureText(text).width));
}

class MapView {
  constructor(node, onHover) {
    this.node = node;
    for (const name of ["map", "board", "cells", "queries", "keys", "strips", "strip-names"]) {
      this[name.replace("-n", "N")] = node.querySelector(`.map.${name}, .map .${name}`);
    }
    [this.across, this.down, this.cursor] = this.cells.querySelectorAll("i");
    this.cells.addEventListener("pointermove", (event) => onHover(this.cellAt(event), event));
    this.cells.addEventListener("pointerleave", () => onHover(null));
    this.cells.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) update(cell);
    });
    this.cells.addEventListener("keydown", moveCell);
  }

  cellAt(event) {
    const box = this.cells.getBoundingClientRect();
    const q = Math.floor((event.clientY - box.top) / this.size);
    const k = Math.floor((event.clientX - box.left) / this.size);
    return q >= 0 && q < this.L && k >= 0 && k < this.S ? { q, k } : null;
  }

  // `tops`: the values of full bars in both strips.
  show(one, layer, top, tops) {
    [, this.L, this.S] = DATA.layers[layer].shape;
    const [queries, keys] = [queriesOf(layer), keysOf(layer)];
    const style = getComputedStyle(this.queries);
    const font = `${style.fontSize} ${style.fontFamily}`;
    const room = this.map.clientWidth;
    const narrow = room < 480;
    const rowLabels = clamp(widest(queries, font) + 14, 46, narrow ? 72 : 132); // 46: the text in the corner
    const strip = narrow ? 36 : 46;
    this.size = state.zoom ?? fitting(room - rowLabels - 2 * strip - 4, this.L, this.S);
    const longest = widest(keys, font);
    const lying = longest + 2 <= Math.max(this.size, CELL.lying);
    const keyLabels = lying ? 30 : clamp(longest + 18, 30, narrow ? 84 : 120);
    const every = (pixels) => Math.ceil(pixels / this.size); // one label for the tokens in so many pixels
    const sizes = { cell: this.size, rows: this.L, columns: this.S, queries: rowLabels, keys: keyLabels, strip };
    for (const [name, value] of Object.entries(sizes)) {
      this.board.style.setProperty(`--${name}`, ["rows", "columns"].includes(name) ? value : `${value}px`);
    }
    this.keys.classList.toggle("standing", !lying);
    this.cells.classList.toggle("ruled", this.size >= 10);
    this.label(this.queries, queries, every(CELL.readable));
    this.label(this.keys, keys, every(lying ? Math.max(longest + 2, CELL.readable) : CELL.readable));
    paint(this.cells.querySelector("canvas"), one, this.L, this.S, top);
    const [entropy, logit] = this.strips.querySelectorAll("canvas");
    paintBars(entropy, one.entropy, tops[0], one.signed);
    paintBars(logit, one.logit, tops[1], one.signed);
    [...this.stripNames.querySelectorAll("small")].forEach((node, i) => {
      node.textContent = Number.isNaN(tops[i]) ? "–" : `${one.signed ? "±" : "0–"}${short(tops[i]).replace(/\.0$/, "")}`;
    });
    this.node.querySelector(".bars").textContent = words()[one.signed ? "bars_diff" : "bars"];
    this.point(state);
  }

  label(axis, texts, every) {
    const first = Math.floor(Math.min(every - 1, 6 / this.size)); // a label needs half of its height before it
    axis.replaceChildren(...texts.map((text, i) => {
      const label = element("span", i % every === first ? "" : "thin");
      label.style.setProperty("--at", i);
      label.append(element("bdi", "", text));
      return label;
    }));
  }

  // Put the cursor on a cell, with the bands that connect it to its tokens.
  point({ q, k }) {
    for (const [node, names] of [[this.across, ["q"]], [this.down, ["k"]], [this.cursor, ["q", "k"]]]) {
      for (const name of names) node.style.setProperty(`--${name}`, { q, k }[name]);
    }
    for (const [axis, i] of [[this.queries, q], [this.keys, k]]) {
      axis.querySelector(".on")?.classList.remove("on");
      axis.children[i]?.classList.add("on");
    }
  }

  // Frame the key that holds the answer.
  want(k) {
    this.keys.querySelector(".wanted")?.classList.remove("wanted");
    if (k !== null) this.keys.children[k]?.classList.add("wanted");
  }

  // Scroll so that the cursor is not under a label.
  reveal({ q, k }) {
    const [left, top] = [this.queries.offsetWidth, this.keys.offsetHeight];
    const right = this.strips.offsetWidth;
    const { clientWidth, clientHeight, scrollLeft, scrollTop } = this.map;
    const [x, y] = [k * this.size, q * this.size];
    this.map.scrollTo({
      left: clamp(scrollLeft, x + this.size - (clientWidth - left - right), x),
      top: clamp(scrollTop, y + this.size - (clientHeight - top), y),
      behavior: "instant",
    });
  }
}

// Pixels per cell: as wide as the room allows, but a map is not taller than the screen.
function fitting(room, L, S) {
  const tall = Math.max(innerHeight * 0.62, 320);
  const size = Math.min(room / S, tall / L, CELL.largest);
  return Math.max(size < 8 ? Math.floor(4 * size) / 4 : Math.floor(size), 1);
}

function zoomBy(factor) {
  const now = views[0].map.size;
  update({ zoom: clamp(factor > 1 ? Math.ceil(now * factor) : Math.floor(now * factor), CELL.smallest, CELL.largest) });
}

function moveCell(event) {
  const [, L, S] = DATA.layers[state.layer].shape;
  const { q, k } = state;
  const moves = {
    ArrowLeft: { k: k - 1 },
    ArrowRight: { k: k + 1 },
    ArrowUp: { q: q - 1 },
    ArrowDown: { q: q + 1 },
    Home: { k: 0 },
    End: { k: S - 1 },
    PageUp: { q: q - 10 },
    PageDown: { q: q + 10 },
  };
  const key = keyOf(event);
  if (key === "+" || key === "-") zoomBy(key === "+" ? 1.4 : 1 / 1.4);
  else if (key in moves) {
    const to = { q, k, ...moves[key] };
    update({ q: clamp(to.q, 0, L - 1), k: clamp(to.k, 0, S - 1) });
    for (const { map } of views) map.reveal(state);
  } else return;
  event.preventDefault();
}
