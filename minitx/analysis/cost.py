"""What a Transformer costs, part by part: parameters, operations and bytes by formula, beside what a meter counts.

**Operations** are those of matrix products, two for each multiplication with its addition (Kaplan et al. 2020,
arXiv:2001.08361, §2.1); everything elementwise and embedding look-ups count nothing. Two numbers are kept apart:

* ``flops``: what runs. A projection takes its forward again for its input and again for its weights in the backward pass;
  attention that computes its scores again there (``sdpa``, ``chunked``) 2.5 times its forward, other cores twice.
  ``math`` multiplies all L × S scores whatever a mask hides, and ``sdpa`` counts as if it did (``minitx.analysis.meter``).
* ``needed``: the project's accounting, 2 · N_mm + 4 · layers · H · D · T_eff a token, times 3 with the backward pass, as
  ``train_flops`` has it. T_eff is the mean number of visible keys, (T + 1) / 2 where causal: exact attention
  without waste, whatever core runs. Utilisation (MFU; Chowdhery et al. 2022, arXiv:2204.02311, Appendix B) is this over
  time and peak speed.

**Bytes** are activations in float32: what a part makes in the forward pass and what lives until its backward pass, logits
among it, as Korthikanti et al. 2022 (arXiv:2205.05198, §4) count for float16. Queries, keys and values count with the core
that reads them. Parameters, gradients, optimizer state and the loss come on top.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitx.analysis.attention_cost import FLOAT, AttentionShape, core_cost, running_core
from minitx.analysis.flops import train_flops
from minitx.analysis.meter import Meter
from minitx.config import TransformerConfig
from minitx.nn.backends.chunked import tile_sizes
from minitx.nn.feedforward import GATED
from minitx.nn.models import TransformerModel, build_model

__all__ = ["Measured", "Part", "ledger", "measure_model", "model_call", "train_flops"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
# tensors as wide as the hidden layer that wait for the backward pass: inputs of what is not linear, outputs of ReLU
_HIDDEN = {"gelu": 2, "gelu_tanh": 2, "relu": 1, "relu2": 2, "swiglu": 4, "geglu": 4, "geglu_tanh": 4, "reglu": 3}


@dataclass(frozen=True)
class Part:
    """A line of the ledger, all layers together.

    Attributes:
        stack: ``encoder``, ``decoder`` or ``cross`` (attention), or "" for what stands before and after the blocks.
        name: ``embedding``, ``q_proj``, ``k_proj``, ``v_proj``, ``core``, ``out_proj``, ``feedforward``, ``norms`` (with the
            residual stream) or ``head`` (with the pooling before it).
        parameters: trainable scalars; those of a tied head are the embedding's.
        flops: operations that run. needed: operations that exact attention needs. bytes: activations that wait for the
            backward pass.
    """

    stack: str
    name: str
    parameters: int
    flops: int
    needed: int
    bytes: int


def ledger(config: TransformerConfig, batch_size: int, length: int, *, backward: bool = True) -> list[Part]:
    """What a model of ``config`` costs for ``batch_size`` rows of ``length`` tokens, part by part, by formula.

    Args:
        config: ``vocab_size`` (and ``num_labels``, ``image_size``, ``num_channels``, where the model has them) must be set.
        length: tokens a row; patches and the class token of a picture; source and target each of an encoder-decoder.
        backward: count forward and backward pass; without it, the forward pass. ``bytes`` are what waits for a backward pass
            in either case.

    Raises:
        ValueError: a backend that cannot serve the model, or of which no formula is known.

    >>> config = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    >>> parts = ledger(config, 2, 5)
    >>> [part.name for part in parts]
    ['embedding', 'q_proj', 'k_proj', 'v_proj', 'core', 'out_proj', 'feedforward', 'norms', 'head']
    >>> sum(part.needed for part in parts) == train_flops(config, 5) * 2
    True
    """
    sizes = _Sizes(config, batch_size, length, backward)
    parts = [sizes.embedding()]
    if config.architecture != "decoder":
        parts += [*sizes.attention("encoder", config.num_layers), *sizes.rest("encoder", config.num_layers)]
    if config.architecture in ("decoder", "encoder_decoder"):
        parts += sizes.attention("decoder", config.decoder_layers)
        if config.architecture == "encoder_decoder":
            parts += sizes.attention("cross", config.decoder_layers)
        parts += sizes.rest("decoder", config.decoder_layers)
    return [*parts, sizes.head()]


@dataclass(frozen=True)
class _Sizes:
    """The sizes that all formulas share, and the formulas."""

    config: TransformerConfig
    batch_size: int
    length: int
    backward: bool

    @property
    def tokens(self) -> int:
        return self.batch_size * self.length

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return FLOAT * self.tokens * self.config.embed_dim

    @property
    def passes(self) -> int:
        return 3 if self.backward else 1

    @property
    def norm(self) -> tuple[int, int]:
        """Parameters of a norm, and the bytes that it keeps beside its output: mean and 1/std, or 1/rms and x/rms."""
        rms = self.config.norm == "rms"
        return self.config.embed_dim * (2 - rms), self.stream + FLOAT * self.tokens if rms else 2 * FLOAT * self.tokens

    @property
    def keeps_branch(self) -> bool:
        """Whether a sublayer's output waits for the backward pass: of a norm or a gain after it."""
        return self.config.norm_position == "sandwich" or self.config.layer_scale is not None

    def product(self, rows: int, inputs: int, outputs: int) -> int:
        """Operations of a linear map of ``rows`` rows."""
        return 2 * rows * inputs * outputs * self.passes

    def embedding(self) -> Part:
        config, E, norm = self.config, self.config.embed_dim, self.norm
        stacks = 2 if config.architecture == "encoder_decoder" else 1
        kept = self.stream * (1 + (config.dropout > 0.0)) + (self.stream + norm[1]) * config.embed_norm
        if config.architecture == "vision":
            return self._patches(kept)
        positions = 0
        if config.position == "learned":
            positions = config.max_len + config.position_offset
            kept += 8 * self.length * (config.position_offset > 0)  # the ids that were looked up
        assert config.vocab_size is not None
        parameters = config.vocab_size * E + stacks * ((positions + config.type_vocab_size) * E + norm[0] * config.embed_norm)
        return Part("", "embedding", parameters, 0, 0, stacks * kept)

    def _patches(self, kept: int) -> Part:
        config, E = self.config, self.config.embed_dim
        assert config.image_size is not None and config.num_channels is not None
        pixels, class_token = config.num_channels * config.patch_size**2, config.num_class_tokens
        table = ((config.image_size // config.patch_size) ** 2 + class_token) * (config.position == "learned")
        parameters = (pixels + 1 + class_token + table) * E + self.norm[0] * config.embed_norm
        rows = self.batch_size * (self.length - class_token)
        flops = 2 * rows * pixels * E * (2 if self.backward else 1)  # no gradient for the pixels
        needed = self.product(self.tokens, pixels, E)  # the accounting gives every token a patch
        return Part("", "embedding", parameters, flops, needed, kept + FLOAT * rows * pixels)

    def attention(self, stack: str, layers: int) -> list[Part]:
        """Projections and core of every layer of a stack."""
        config, E, D = self.config, self.config.embed_dim, self.config.width_per_head
        query, key, bias = config.num_heads * D, config.kv_heads * D, config.has_qkv_bias
        widths, biases = (query, key, key, query), (query * bias, key * bias, key * bias, E * config.has_out_bias)
        parts = []
        for name, width, more in zip(PROJECTIONS, widths, biases, strict=True):
            products = self._again(layers * self.product(self.tokens, E, width))
            parts.append(Part(stack, name, layers * (E * width + more), *products, 0))
        shape = AttentionShape(config, self.batch_size, self.length, stack == "decoder", stack == "cross", self.backward)
        cost = core_cost(shape)
        flops = cost.forward + (cost.backward + cost.forward * config.checkpointing) * self.backward
        parameters = layers * self._core_parameters()
        if config.position == "t5" and not shape.cross:
            parameters += config.num_buckets * config.num_heads  # one table for all layers
        kept = 0 if config.checkpointing else layers * self._attention_bytes(shape)
        if kept and shape.window is not None and shape.bias is None and running_core(shape) == "sdpa":
            kept -= (layers - 1) * FLOAT * self.length**2  # the layers share the kernel's mask
        if shape.mask is not None and running_core(shape) == "chunked":
            height, width, _ = tile_sizes(shape.mask, (self.batch_size, config.num_heads, self.length, self.length))
            kept += -(-self.length // height) * -(-self.length // width)  # one byte a tile, for all layers
        core = Part(stack, "core", parameters, layers * flops, layers * shape.needed * self.passes, kept)
        return [*parts[:3], core, parts[3]]

    def _again(self, flops: int, *, unless: int = 0) -> tuple[int, int]:
        """(flops, needed): ``checkpointing`` runs the forward pass again, but for the share that nobody asks for."""
        again = (flops - unless) // 3 if self.config.checkpointing and self.backward else 0
        return flops + again, flops

    def _core_parameters(self) -> int:
        config, D = self.config, self.config.width_per_head
        norms = {None: 0, "rms": 2 * D, "layer": 4 * D, "l2": config.kv_heads}[config.qk_norm]
        mixes = 2 * (config.num_slots or 0) * config.max_len if config.attention == "linformer" else 0
        return norms + mixes + config.num_heads * (config.sinks + (config.scale == "learned"))

    def _attention_bytes(self, shape: AttentionShape) -> int:
        """Of one layer: what its core keeps, and what is made on the way there and back."""
        config, shape = self.config, dataclasses.replace(shape, training=True)
        cost, rotary = core_cost(shape), config.position == "rotary" and not shape.cross
        heads_first = rotary or config.qk_norm in ("rms", "layer")  # in memory; sdpa's output is laid out as its queries are
        outputs = cost.outputs + (heads_first and running_core(shape) == "sdpa")
        both = shape.q + shape.k
        rows = both // config.width_per_head
        normed = {"rms": 2 * both + rows, "layer": both + 2 * rows, "l2": both + shape.k + 2 * rows}
        numbers = cost.reads + outputs * shape.q + normed.get(config.qk_norm or "", 0)
        numbers += shape.q * (config.scale == "learned")
        return FLOAT * numbers + cost.keeps + self.stream * self.keeps_branch

    def rest(self, stack: str, layers: int) -> list[Part]:
        """Feed-forward and norms of a stack of blocks, and the norm after them."""
        config = self.config
        ends_normed = config.norm_position in ("post", "deepnorm")
        parameters, kept = self._residual()
        residuals = (1 if config.parallel else 2) + (stack == "decoder" and config.architecture == "encoder_decoder")
        total = layers * (self.stream if config.checkpointing else residuals * kept)
        final = 0 if ends_normed else self.norm[1] + self.stream
        if (config.head == "sequence" and config.pooling == "mean") or (config.scale_logits and stack == "decoder"):
            final -= self.stream  # a mean and a factor need nothing of what they are taken of
        norms = layers * residuals * parameters + (0 if ends_normed else self.norm[0])
        return [self._feedforward(stack, layers), Part(stack, "norms", norms, 0, 0, total + final)]

    def _residual(self) -> tuple[int, int]:
        """Parameters and kept bytes of one residual connection: its norms, and the stream after it."""
        config, (norm, stats) = self.config, self.norm
        two, gain = config.norm_position == "sandwich", config.layer_scale is not None
        kept = 2 * self.stream + stats + two * (stats + gain * self.stream) + self.stream * (config.dropout > 0.0)
        return norm * (1 + two) + config.embed_dim * gain, kept

    def _feedforward(self, stack: str, layers: int) -> Part:
        config, E, F = self.config, self.config.embed_dim, self.config.ffn_width
        matrices, dropped = 3 if config.activation in GATED else 2, config.dropout > 0.0
        hidden = _HIDDEN[config.activation] + dropped * (2 if config.activation == "relu" else 1)
        rows, parameters, router, numbers = self.tokens, matrices * E * F, 0, 0
        if config.num_experts is None:
            parameters += (F * (matrices - 1) + E) * config.bias
        else:
            rows, router = rows * config.experts_per_token, self.product(self.tokens, E, config.num_experts)
            parameters = config.num_experts * (parameters + E)
            numbers = rows * (3 * E + 4)
        product = self.product(rows, E, F)
        plain = config.norm_position == "pre" and config.num_experts is None and not dropped
        plain = plain and config.layer_scale is None and config.stochastic_depth == 0.0
        # recomputing stops where the last tensor is found that the backward pass wants: before a plain last product
        flops, needed = self._again(layers * (matrices * product + router), unless=layers * product * plain)
        kept = FLOAT * (numbers + hidden * rows * F) + self.stream * self.keeps_branch
        return Part(stack, "feedforward", layers * parameters, flops, needed, 0 if config.checkpointing else layers * kept)

    def head(self) -> Part:
        config, E = self.config, self.config.embed_dim
        dense = E * E + E
        if config.head == "lm":
            V = config.vocab_size
            assert V is not None
            tied = config.tie_embeddings
            parameters = V * E * (not tied) + V * config.head_bias
            logits = FLOAT * self.tokens * V * (1 + (config.logit_softcap is not None))
            flops, kept = self.product(self.tokens, E, V), logits + self.stream * config.scale_logits
            if config.head_transform:
                act = 1 if config.activation in ("relu", "reglu") else 2
                parameters += dense + self.norm[0]
                flops, kept = flops + self.product(self.tokens, E, E), kept + (act + 1) * self.stream + self.norm[1]
            return Part("", "head", parameters, flops, flops, kept + self._positions())
        rows = self.tokens if config.head == "token" else self.batch_size
        outputs = 0 if config.head == "none" else config.num_labels or 0
        parameters = outputs * (E + 1) + dense * config.pooler
        flops = needed = self.product(rows, E, outputs)
        if config.pooler:  # without a head it answers beside the output: no gradient comes back from there
            needed += self.product(rows, E, E)
            flops += 2 * rows * E * E if config.head == "none" else self.product(rows, E, E)
        pooled = FLOAT * rows * E * (config.pooler + (config.pooling == "mean")) * (config.head == "sequence")
        return Part("", "head", parameters, flops, needed, FLOAT * rows * outputs + pooled + self._positions())

    def _positions(self) -> int:
        """Bytes of the positions or angles of a forward pass, which the model makes once for all its layers."""
        config = self.config
        stacks = (2 if config.architecture == "encoder_decoder" else 1) * (config.architecture != "vision")
        looked_up = 8 * self.length * (config.position == "learned" and not config.position_offset)
        return stacks * (looked_up + FLOAT * self.length * config.width_per_head * (config.position == "rotary"))


@dataclass(frozen=True)
class Measured:
    """What was counted while a model ran once on random input.

    Attributes:
        parameters, flops, bytes: by (stack, name), as in ``Part``. ``bytes`` are those alive when the forward pass ended, and
            there are none without a backward pass; those of the projections count with the core.
        peak: most bytes of tensors at once, gradients included, parameters not.
    """

    parameters: Counter[tuple[str, str]]
    flops: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]
    peak: int


def measure_model(config: TransformerConfig, batch_size: int, length: int, *, backward: bool = True) -> Measured:
    """Build a model of ``config``, run it once on random input, with its backward pass or without, and count.

    The arguments are those of ``ledger``. The backward pass starts from a gradient of ones for the logits: no loss is counted.

    >>> config = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    >>> counted, parts = measure_model(config, 2, 5), ledger(config, 2, 5)
    >>> all(counted.flops[part.stack, part.name] == part.flops for part in parts)
    True
    """
    model, run = model_call(config, batch_size, length, backward=backward)
    alive: Counter[str] = Counter()
    with Meter() as meter, meter.watch(model):
        run(lambda: alive.update(meter.live_of))
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[name.rpartition(".")[0]] += parameter.numel()
    kept: Counter[tuple[str, str]] = Counter()
    for (stack, name), number in _by_part(model, alive if backward else Counter()).items():
        kept[stack, "core" if name in PROJECTIONS else name] += number
    return Measured(_by_part(model, parameters), _by_part(model, meter.flops_of), kept, meter.peak)


def model_call(
    config: TransformerConfig, batch_size: int, length: int, *, backward: bool = True
) -> tuple[TransformerModel, Callable[..., None]]:
    """The model and the run that ``measure_model`` counts: ``run(look)`` calls ``look()`` between forward and backward pass."""
    model = build_model(config).train(backward)
    inputs = example_inputs(config, batch_size, length)

    def run(look: Callable[[], None] = lambda: None) -> None:
        with torch.set_grad_enabled(backward):
            out = model(**inputs)
            look()
            if backward:
                out.backward(torch.ones(()).expand_as(out))

    return model, run


def _by_part(model: TransformerModel, counts: Counter[str]) -> Counter[tuple[str, str]]:
    """Counts by the names of modules as counts by (stack, name)."""
    found: Counter[tuple[str, str]] = Counter()
    for module, number in counts.items():
        found[_part_of(module.split("."), model.config.architecture)] += number
    return found


def _part_of(path: list[str], architecture: str) -> tuple[str, str]:
    if path[0] == "encoder":
        path, architecture = path[1:], "encoder"
    stack = "encoder" if architecture in ("encoder", "vision") else "decoder"
    match path:
        case ["embeddings", *_]:
            return "", "embedding"
        case ["blocks", _, "feedforward", *_]:
            return stack, "feedforward"
        case ["blocks", _, "attention" | "cross_attention" as attention, *inner]:
            name = inner[0] if inner and inner[0] in PROJECTIONS else "core"
            return "cross" if attention == "cross_attention" else stack, name
        case ["attn_bias"]:
            return stack, "core"
        case ["blocks", *_] | ["final_norm"]:
            return stack, "norms"
        case _:
            return "", "head"


def example_inputs(config: TransformerConfig, batch_size: int, length: int) -> dict[str, Tensor]:
    """Random input of ``length`` tokens a row, as a model of ``config`` takes it; pictures are square where they can be."""
    if config.architecture == "vision":
        patches, P = length - config.num_class_tokens, config.patch_size
        side = round(patches**0.5)
        rows = side if side * side == patches else 1
        assert config.num_channels is not None
        return {"pixel_values": torch.randn(batch_size, config.num_channels, rows * P, patches // rows * P)}
    assert config.vocab_size is not None
    names = ["input_ids", *(["decoder_input_ids"] if config.architecture == "encoder_decoder" else [])]
    ids = {name: torch.randint(config.vocab_size, (batch_size, length)) for name in names}
    types = {"token_type_ids": torch.zeros(batch_size, length, dtype=torch.long)} if config.type_vocab_size else {}
    return ids | types
