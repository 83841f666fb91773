// Lines between tokens (Vig 2019, BertViz, head view): queries on the left, keys on the right, opacity is weight.

const FAINTEST = 0.02; // smaller weights have no line
const MOST_LINES = 4000;

class LinesView {
  constructor(node, pane) {
    this.pane = pane;
    for (const name of ["chips", "web", "note"]) this[name] = node.querySelector(`.lines .${name}`);
    this.queries = this.web.querySelector(".queries");
    this.keys = this.web.querySelector(".keys");
    this.canvas = this.web.querySelector("canvas");
    this.held = null; // { side, i }: if set, only the lines of this token are drawn
    for (const [side, list] of [["q", this.queries], ["k", this.keys]]) {
      const number = (event) => Number(event.target.closest("li")?.dataset.i ?? -1);
      list.addEventListener("pointerover", (event) => number(event) >= 0 && this.hold({ side, i: number(event) }));
      list.addEventListener("pointerleave", () => this.hold(this.focused()));
      list.addEventListener("focusin", (event) => this.hold({ side, i: number(event) }));
      list.addEventListener("focusout", () => this.hold(null));
      list.addEventListener("click", (event) => number(event) >= 0 && update({ [side]: number(event) }));
      list.addEventListener("keydown", (event) => this.move(event, side));
    }
  }

  focused() {
    const at = document.activeElement?.closest?.("li");
    if (!at || !this.web.contains(at)) return null;
    return { side: at.parentElement === this.queries ? "q" : "k", i: Number(at.dataset.i) };
  }

  move(event, side) {
    const items = [this.queries, this.keys][side === "q" ? 0 : 1].children;
    const from = Number(event.target.dataset.i);
    const key = keyOf(event);
    const to = { ArrowUp: from - 1, ArrowDown: from + 1, Home: 0, End: items.length - 1 }[key];
    if (key === "Escape") event.target.blur();
    else if (key === "ArrowLeft" || key === "ArrowRight") {
      (key === "ArrowLeft" ? this.queries : this.keys).querySelector("[tabindex='0']").focus();
    } else if (to === undefined) return;
    else {
      const item = items[clamp(to, 0, items.length - 1)];
      item.focus();
      update({ [side]: Number(item.dataset.i) });
    }
    event.preventDefault();
  }

  hold(token) {
    if (JSON.stringify(token) === JSON.stringify(this.held)) return;
    this.held = token;
    this.draw();
  }

  show(layer) {
    this.layer = layer;
    [this.H, this.L, this.S] = DATA.layers[layer].shape;
    const isSigned = this.pane === "diff";
    this.heads = isSigned ? [state.head] : [...new Set([state.head, ...state.extra])].sort((a, b) => a - b);
    this.fields = this.heads.map((head) => field(this.pane, layer, head));
    this.tops = this.fields.map((one) => topOf([one]));
    this.held = null;
    this.fill(this.queries, queriesOf(layer), state.q);
    this.fill(this.keys, keysOf(layer), state.k);
    this.showChips(isSigned);
    this.draw();
  }

  fill(list, texts, chosen) {
    list.replaceChildren(...texts.map((text, i) => {
      const item = Object.assign(element("li"), { role: "option" });
      item.dataset.i = i;
      item.append(element("bdi", "", text));
      return item;
    }));
    this.choose(list, chosen);
  }

  // Tab reaches the cursor's token.
  choose(list, i) {
    for (const item of list.querySelectorAll("[tabindex='0']")) Object.assign(item, { tabIndex: -1, ariaSelected: "false" });
    if (list.children[i]) Object.assign(list.children[i], { tabIndex: 0, ariaSelected: "true" });
  }

  point({ q, k }) {
    this.choose(this.queries, q);
    this.choose(this.keys, k);
  }

  showChips(isSigned) {
    this.chips.hidden = isSigned || this.H === 1;
    this.chips.replaceChildren(...Array.from({ length: this.H }, (_, head) => {
      const chip = buildButton("chip", `h${head}`, () => {
        const extra = new Set(state.extra);
        if (!extra.delete(head)) extra.add(head);
        update({ extra });
        views.find((view) => view.lines === this)?.lines.chips.children[head].focus();
      });
      chip.style.setProperty("--colour", headColour(head));
      chip.ariaPressed = String(this.heads.includes(head));
      chip.ariaLabel = words().chip(head);
      if (head === state.head) {
        chip.ariaDisabled = "true";
        chip.title = words().on_map;
      }
      return chip;
    }));
  }

  colour(h, value) {
    if (this.pane !== "diff") return headColour(this.heads[h]);
    return `rgb(${mix(RAMPS[theme()].signed, value > 0 ? 5 / 6 : 1 / 6)})`;
  }

  // The weight. The lines of a single token are as strong as the colours of the map, because few of them overlap.
  opacity(value, top) {
    return this.held ? strength(value, top) : Math.min(Math.abs(value) / (top || 1), 1);
  }

  lines() {
    const { side, i } = this.held ?? {};
    const found = [];
    this.torn = false; // whether a weight is NaN
    this.fields.forEach(({ weights, visible }, h) => {
      for (let q = side === "q" ? i : 0; q < (side === "q" ? i + 1 : this.L); q++) {
        for (let k = side === "k" ? i : 0; k < (side === "k" ? i + 1 : this.S); k++) {
          const at = q * this.S + k;
          const alpha = visible[at] ? this.opacity(weights[at], this.tops[h]) : 0;
          this.torn ||= Number.isNaN(alpha);
          if (alpha >= FAINTEST) found.push({ h, q, k, alpha, value: weights[at] });
        }
      }
    });
    return found;
  }

  draw() {
    const found = this.lines().sort((a, b) => a.alpha - b.alpha);
    const drawn = found.slice(-MOST_LINES);
    const high = (list) => (list.lastElementChild ? list.lastElementChild.offsetTop + list.lastElementChild.offsetHeight : 0);
    const height = Math.max(high(this.queries), high(this.keys), 1);
    const width = this.canvas.clientWidth || 120;
    const sharp = Math.min(devicePixelRatio || 1, 16000 / height); // a canvas has at most about 16,000 pixels
    this.canvas.width = width * sharp;
    this.canvas.height = height * sharp;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(sharp, sharp);
    context.lineWidth = 1.6;
    const middle = (list, i) => list.children[i].offsetTop + list.children[i].offsetHeight / 2;
    const [left, right] = [this.queries, this.keys].map((list) => Array.from(list.children, (_, i) => middle(list, i)));
    for (const { h, q, k, alpha, value } of drawn) {
      context.globalAlpha = alpha;
      context.strokeStyle = this.colour(h, value);
      context.beginPath();
      context.moveTo(0, left[q]);
      context.bezierCurveTo(width / 2, left[q], width / 2, right[k], width, right[k]);
      context.stroke();
    }
    this.shade(drawn);
    this.say(found.length, drawn.length);
  }

  // The tokens that are connected to the held token, in the colours of the heads, as strong as the lines.
  shade(drawn) {
    for (const list of [this.queries, this.keys]) {
      for (const item of list.querySelectorAll(".lit, .held")) {
        item.classList.remove("lit", "held");
        item.style.backgroundImage = "";
      }
    }
    if (!this.held) return;
    const { side, i } = this.held;
    const [own, other] = side === "q" ? [this.queries, this.keys] : [this.keys, this.queries];
    own.children[i]?.classList.add("held");
    const stripes = new Map();
    for (const line of drawn) {
      const at = side === "q" ? line.k : line.q;
      const colour = `color-mix(in srgb, ${this.colour(line.h, line.value)} ${Math.round(75 * line.alpha)}%, transparent)`;
      if (!stripes.has(at)) stripes.set(at, this.heads.map(() => "transparent"));
      stripes.get(at)[line.h] = colour;
    }
    for (const [at, colours] of stripes) {
      const parts = colours.map((c, h) => `${c} ${(100 * h) / colours.length}% ${(100 * (h + 1)) / colours.length}%`);
      other.children[at].classList.add("lit");
      other.children[at].style.backgroundImage = `linear-gradient(to right, ${parts.join(", ")})`;
    }
  }

  say(found, drawn) {
    const told = this.torn ? [words().nan_line] : [];
    if (!found) told.push(words().no_line(Boolean(this.held), FAINTEST));
    else if (drawn < found) told.push(words().most_lines(...[drawn, found].map((count) => count.toLocaleString("en"))));
    if (!this.held) told.push(words().point);
    this.note.textContent = told.join(" ");
  }
}
