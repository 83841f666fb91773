// Random numbers, drawn like torch on a CPU, so a seed gives the same numbers as in examples/why_scale.py.

const CHUNK = 16; // torch transforms sixteen uniform numbers into sixteen normal numbers

// torch.randn(..., generator=torch.Generator().manual_seed(seed)), in float32, a piece at a time. The whole tensor must hold a
// multiple of 16 numbers. Mersenne Twister (Matsumoto and Nishimura 1998), then Box and Muller 1958.
class Normal {
  constructor(seed) {
    this.words = new Uint32Array(624);
    this.words[0] = seed;
    for (let i = 1; i < 624; i++) {
      const before = this.words[i - 1] ^ (this.words[i - 1] >>> 30);
      this.words[i] = Math.imul(1812433253, before) + i;
    }
    this.at = 624;
    this.chunk = new Float32Array(CHUNK);
    this.used = CHUNK;
  }

  twist() {
    const w = this.words;
    for (let i = 0; i < 624; i++) {
      const y = (w[i] & 0x80000000) | (w[(i + 1) % 624] & 0x7fffffff);
      w[i] = w[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.at = 0;
  }

  // In [0, 1), a multiple of 2^-24.
  uniform() {
    if (this.at === 624) this.twist();
    let y = this.words[this.at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    y ^= y >>> 18;
    return (y & 0xffffff) / 2 ** 24;
  }

  fill(numbers) {
    for (let i = 0; i < numbers.length; i++) {
      if (this.used === CHUNK) this.refill();
      numbers[i] = this.chunk[this.used++];
    }
    return numbers;
  }

  refill() {
    for (let i = 0; i < CHUNK; i++) this.chunk[i] = this.uniform();
    for (let i = 0; i < CHUNK / 2; i++) {
      const radius = Math.sqrt(-2 * Math.log(1 - this.chunk[i]));
      const angle = 2 * Math.PI * this.chunk[i + CHUNK / 2];
      this.chunk[i] = radius * Math.cos(angle);
      this.chunk[i + CHUNK / 2] = radius * Math.sin(angle);
    }
    this.used = 0;
  }
}

const BATCHES = 200;
const QUERIES = 32; // of each batch: 6,400 rows in all

// q·k of QUERIES random queries with `numKeys` random keys each, batch by batch.
class Sample {
  constructor(headDim, numKeys, seed) {
    Object.assign(this, { headDim, numKeys, seed, batches: [] });
    this.draws = [new Normal(2 * seed), new Normal(2 * seed + 1)];
    this.query = new Float32Array(QUERIES * headDim);
    this.key = new Float32Array(numKeys * headDim);
  }

  batch(number) {
    while (this.batches.length <= number) this.batches.push(this.dots());
    return this.batches[number];
  }

  dots() {
    const [query, key, D, n] = [this.draws[0].fill(this.query), this.draws[1].fill(this.key), this.headDim, this.numKeys];
    const found = new Float32Array(QUERIES * n);
    for (let i = 0; i < QUERIES; i++) {
      for (let j = 0; j < n; j++) {
        let sum = 0;
        for (let d = 0; d < D; d++) sum += query[i * D + d] * key[j * D + d];
        found[i * n + j] = sum;
      }
    }
    return found;
  }
}
