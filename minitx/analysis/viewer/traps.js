// Scene 4. In each piece of code one line is wrong. `fix` is the correct code, up to the end if it has several lines. `mutant` is
// the name of the mistake in minitx.check.

const TRAPS = [
  {
    lines: [
      "def attention(q, k, v, hidden):",
      "    z = q @ k.mT / q.shape[-1] ** 0.5",
      "    z = z + hidden * torch.tensor(-1e9, dtype=z.dtype)",
      "    p = z.softmax(-1)",
      "    return p @ v",
    ],
    wrong: 2,
    fix: "    z = z.masked_fill(hidden, torch.finfo(z.dtype).min)\n    p = z.softmax(-1).masked_fill(hidden, 0)\n    return p @ v",
    mutant: "−1e9 added to hidden scores",
  },
  {
    lines: [
      "def attention(q, k, v):",
      "    z = q @ k.mT / q.shape[-1] ** 0.5",
      "    p = z.exp() / (z.exp().sum(-1, keepdim=True) + 1e-6)",
      "    return p @ v",
    ],
    wrong: 2,
    fix: "    p = z.softmax(-1)",
    mutant: "eps in the denominator",
  },
  {
    lines: [
      "def attention(q, k, v, visible):",
      "    z = q @ k.mT / q.shape[-1] ** 0.5",
      "    p = z.masked_fill(~visible, -torch.inf).softmax(-1)",
      "    return p @ v",
    ],
    wrong: 2,
    fix: "    z = z.masked_fill(~visible, torch.finfo(z.dtype).min)\n    p = z.softmax(-1).masked_fill(~visible, 0)\n    return p @ v",
    mutant: "NaN where a query sees nothing",
  },
  {
    lines: [
      "def attention(q, k, v, old_k, old_v):",
      "    k = torch.cat([old_k, k], dim=2)",
      "    v = torch.cat([old_v, v], dim=2)",
      "    return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    ],
    wrong: 3,
    fix: "    return F.scaled_dot_product_attention(q, k, v)",
    mutant: "causal mask from the upper left",
  },
  {
    lines: [
      "def attention(layer, x, attention_mask):",
      "    real = attention_mask.bool()",
      "    y, _ = layer(x, x, x, key_padding_mask=real)",
      "    return y",
    ],
    wrong: 2,
    fix: "    y, _ = layer(x, x, x, key_padding_mask=~real)",
    mutant: "mask inverted",
  },
  {
    lines: [
      "def attention(q, k, v, visible):",
      "    z = q @ k.mT / q.shape[-1] ** 0.5",
      "    z = z.masked_fill(~visible, torch.finfo(z.dtype).min)",
      "    p = z.softmax(-1).masked_fill(~visible, 0)",
      "    p = (p + 1e-8) / (p + 1e-8).sum(-1, keepdim=True)",
      "    return p @ v",
    ],
    wrong: 4,
    fix: "    return p @ v",
    mutant: "eps after the softmax",
  },
  {
    lines: [
      "def attention(q, k, v, size=64):",
      "    out = torch.zeros_like(q)",
      "    for i in range(0, q.shape[-2], size):",
      "        z = q[..., i : i + size, :] @ k.mT / q.shape[-1] ** 0.5",
      "        out[..., i : i + size, :] = z.softmax(-1) @ v",
      "    return out",
    ],
    wrong: 1,
    fix: "    out = q.new_zeros(*q.shape[:-1], v.shape[-1])",
    mutant: "zeros_like(Q) for d_v ≠ d_k",
  },
  {
    lines: [
      "def attention(q, k, v, visible):",
      "    z = q @ k.mT / q.shape[-1] ** 0.5",
      "    p = z.masked_fill(~visible, -1e9).softmax(-1)",
      "    return p @ v",
    ],
    wrong: 2,
    fix: "    z = z.masked_fill(~visible, torch.finfo(z.dtype).min)\n    p = z.softmax(-1).masked_fill(~visible, 0)\n    return p @ v",
    mutant: "padding mask of −1e9 averages hidden values",
  },
  {
    lines: [
      "def split_heads(x, num_heads):",
      "    B, L, E = x.shape",
      "    return x.view(B, num_heads, L, E // num_heads)",
    ],
    wrong: 2,
    fix: "    return x.view(B, L, num_heads, E // num_heads).transpose(1, 2)",
    mutant: "heads by view",
  },
];

const clicked = TRAPS.map(() => new Set()); // the lines of each trap

function buildTraps() {
  byId("mistakes").replaceChildren(...TRAPS.map(buildTrap));
}

function buildTrap({ lines, wrong, fix, mutant }, number) {
  const { title, task, told } = words().traps[number];
  const { not_this: notThis, found_it: foundIt, instead, line_label: lineLabel } = words();
  const part = element("section", "trap");
  const answer = Object.assign(element("div", "answer"), { role: "status" });
  const code = element("ol", "code");
  const buttons = lines.map((text, i) => {
    const button = buildButton("", "", () => {
      if (clicked[number].has(wrong)) return;
      clicked[number].add(i);
      show(i);
    });
    button.id = `line-${number}-${i}`;
    button.append(element("code", "", text));
    const item = element("li");
    item.append(button);
    code.append(item);
    return button;
  });
  const show = (last) => {
    const isFound = clicked[number].has(wrong);
    buttons.forEach((button, i) => {
      const mark = !clicked[number].has(i) ? "" : i === wrong ? "right" : "wrong";
      button.className = mark;
      button.ariaLabel = lineLabel(i + 1, lines[i].trim(), { right: "✓", wrong: "✗" }[mark] ?? "");
      button.ariaDisabled = String(isFound);
    });
    if (last === undefined) return;
    if (!isFound) answer.replaceChildren(element("strong", "wrong", words().wrong), ` ${notThis(last + 1)}`);
    else {
      const fixed = element("pre");
      fixed.append(element("code", "", fix));
      const name = element("p", "soft");
      name.append(element("code", "", `mutant("${mutant}")`));
      answer.replaceChildren(element("p", "", told), element("p", "", instead), fixed, name);
      answer.firstChild.prepend(element("strong", "right", words().right), ` ${foundIt(wrong + 1)} `);
    }
  };
  part.append(element("h2", "", title), element("p", "", task), code, answer);
  show(clicked[number].size ? [...clicked[number]].at(-1) : undefined);
  return part;
}
