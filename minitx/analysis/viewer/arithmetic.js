// The arithmetic of attention: one row by hand, statistics of many rows, and rounding to 16 bits.

const dot = (a, b) => a.reduce((sum, x, d) => sum + x * b[d], 0);
const total = (numbers) => numbers.reduce((sum, x) => sum + x, 0);

// One query q (D) over keys (n × D) and values (n × Dv). A hidden key has weight 0; a query that sees no key gets zeros.
function attend(q, keys, values, visible) {
  const dots = keys.map((k) => dot(q, k));
  const scores = dots.map((x) => x / Math.sqrt(q.length));
  const masked = scores.map((z, j) => (visible[j] ? z : -Infinity));
  const top = Math.max(...masked);
  const exps = masked.map((z) => (z === -Infinity ? 0 : Math.exp(z - top)));
  const sum = total(exps);
  const weights = exps.map((e) => (sum > 0 ? e / sum : 0));
  const parts = weights.map((p, j) => values[j].map((v) => p * v));
  return { dots, scores, masked, top, exps, sum, weights, parts, output: values[0].map((_, d) => total(parts.map((part) => part[d]))) };
}

// --- 16-bit numbers: round to nearest, ties to even

const asFloat = new Float32Array(1);
const asBits = new Uint32Array(asFloat.buffer);

function nearest(x, lostBits) {
  asFloat[0] = x;
  asBits[0] += 2 ** (lostBits - 1) - 1 + ((asBits[0] >>> lostBits) & 1);
  asBits[0] &= -(2 ** lostBits);
  return asFloat[0];
}

const bf16 = (x) => nearest(x, 16);

function fp16(x) {
  if (Math.abs(x) >= 65520) return x > 0 ? Infinity : -Infinity;
  if (Math.abs(x) < 2 ** -14) return (x * 2 ** 24 + 1.5 * 2 ** 52 - 1.5 * 2 ** 52) / 2 ** 24; // steps of 2^-24
  return nearest(x, 13);
}

// --- statistics over rows of logits z = c · q·k, as `attention_statistics` and examples/why_scale.py define them

class Statistics {
  constructor(c, numVisible) {
    Object.assign(this, { c, n: numVisible, rows: 0, sums: { row_std: 0, entropy: 0, max_weight: 0, saturation_90: 0, saturation_99: 0, jacobian_l1: 0 } });
    Object.assign(this, { max_logit: 0, overflow: 0, repaired: 0, zeros: 0, rounding: 0, moved: 0 });
    this.z = new Float64Array(numVisible);
  }

  add(dots, numKeys) {
    for (let start = 0; start < dots.length; start += numKeys) {
      for (let j = 0; j < this.n; j++) this.z[j] = this.c * dots[start + j];
      const top = this.z.reduce((most, z) => Math.max(most, z), -Infinity);
      this.addRow(top);
      this.addFp16(top);
      this.addBf16(top);
      this.rows += 1;
    }
  }

  addRow(top) {
    const { z, n, sums } = this;
    let [mean, variance, sum, product, squares] = [0, 0, 0, 0, 0];
    for (let j = 0; j < n; j++) mean += z[j] / n;
    for (let j = 0; j < n; j++) {
      const e = Math.exp(z[j] - top);
      variance += (z[j] - mean) ** 2 / (n - 1);
      sum += e;
      product += e * (z[j] - top);
      squares += e * e;
      this.max_logit = Math.max(this.max_logit, Math.abs(z[j]));
    }
    this.sum = sum;
    sums.row_std += Math.sqrt(variance);
    sums.entropy += (Math.log(sum) - product / sum) / Math.log(n);
    sums.max_weight += 1 / sum;
    sums.saturation_90 += 1 / sum > 0.9;
    sums.saturation_99 += 1 / sum > 0.99;
    sums.jacobian_l1 += 1 - squares / sum ** 2;
  }

  // exp(z) and exp(z − max) in fp16.
  addFp16(top) {
    let [sum, shiftedSum] = [0, 0];
    const highest = fp16(top);
    for (let j = 0; j < this.n; j++) {
      const half = fp16(this.z[j]);
      sum += fp16(Math.exp(half));
      const shifted = fp16(Math.exp(fp16(half - highest)));
      shiftedSum += shifted;
      this.zeros += shifted === 0;
    }
    this.overflow += !(sum > 0 && sum < Infinity);
    this.repaired += !(shiftedSum > 0 && shiftedSum < Infinity);
  }

  addBf16(top) {
    let [sum, moved] = [0, 0];
    const highest = bf16(top);
    for (let j = 0; j < this.n; j++) {
      const rounded = bf16(this.z[j]);
      this.rounding = Math.max(this.rounding, Math.abs(rounded - this.z[j]));
      sum += Math.exp(rounded - highest);
    }
    for (let j = 0; j < this.n; j++) {
      moved += Math.abs(Math.exp(bf16(this.z[j]) - highest) / sum - Math.exp(this.z[j] - top) / this.sum) / 2;
    }
    this.moved = Math.max(this.moved, moved);
  }

  found() {
    const { rows, sums, max_logit, rounding, moved } = this;
    const means = Object.fromEntries(Object.entries(sums).map(([name, sum]) => [name, sum / rows]));
    const shares = { overflow: this.overflow / rows, repaired: this.repaired / rows, zeros: this.zeros / rows / this.n };
    return { ...means, scaled_jacobian_l1: Math.abs(this.c) * means.jacobian_l1, max_logit, ...shares, rounding, moved };
  }
}
