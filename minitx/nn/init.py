"""Initial weights: one function, one table of schemes.

What a scheme decides, for d_model = E, d_k = D and unit-variance inputs, is the standard deviation of unscaled logits,
σ_u = √D · E · σ_WQ · σ_WK: 8.0 at D = 64 for ``lecun`` and ``xavier``, 4.0 for ``torch_mha``, 2.7 for ``torch_linear``,
1 for ``t5``, 0.41 (E = 128) for ``gpt2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitx.nn.attention import MultiHeadAttention
from minitx.nn.feedforward import FeedForward, MixtureOfExperts
from minitx.nn.positions import LearnedPositions


@dataclass(frozen=True)
class Sizes:
    """What a rule may look at: the matrix's fan-in and fan-out, head_dim D, and the number of layers."""

    fan_in: int
    fan_out: int
    head_dim: int
    num_layers: int


@dataclass(frozen=True)
class Scheme:
    """Standard deviations by role (``weight`` where a role has no rule of its own), and the shape of the draw."""

    weight: Callable[[Sizes], float]
    uniform: bool = False
    roles: dict[str, Callable[[Sizes], float]] | None = None
    bias: Callable[[Sizes], float] | None = None

    def std(self, role: str, sizes: Sizes) -> float:
        """The standard deviation of the weights that play ``role``."""
        return (self.roles or {}).get(role, self.weight)(sizes)


def _fan_in(s: Sizes) -> float:
    return s.fan_in**-0.5


def _xavier(s: Sizes) -> float:
    return (2.0 / (s.fan_in + s.fan_out)) ** 0.5


def _unit(s: Sizes) -> float:
    return 1.0


SCHEMES: dict[str, Scheme] = {
    # Radford et al. 2019 (GPT-2): N(0, 0.02²), residual projections divided by √(2 · layers)
    "gpt2": Scheme(
        weight=lambda s: 0.02,
        roles={"residual": lambda s: 0.02 / (2 * s.num_layers) ** 0.5},
    ),
    # LeCun et al. 1998, "Efficient BackProp": unit-variance inputs give unit-variance outputs
    "lecun": Scheme(weight=_fan_in, roles={"embedding": _unit}),
    # Glorot & Bengio 2010, each projection on its own
    "xavier": Scheme(weight=_xavier, uniform=True, roles={"embedding": _unit, "head": _fan_in}),
    # torch.nn.MultiheadAttention: Xavier over the stacked (3E, E) matrix; out_proj and the rest as nn.Linear
    "torch_mha": Scheme(
        weight=lambda s: (3 * s.fan_in) ** -0.5,
        uniform=True,
        roles={"qkv": lambda s: (2 * s.fan_in) ** -0.5, "embedding": _unit},
    ),
    # torch.nn.Linear: U(±1/√fan_in), biases alike
    "torch_linear": Scheme(
        weight=lambda s: (3 * s.fan_in) ** -0.5,
        uniform=True,
        roles={"embedding": _unit},
        bias=lambda s: (3 * s.fan_in) ** -0.5,
    ),
    # Raffel et al. 2020 (arXiv:1910.10683): 1/√d_k folded into W_Q, attention unscaled
    "t5": Scheme(
        weight=_fan_in,
        roles={"query": lambda s: (s.fan_in * s.head_dim) ** -0.5, "embedding": _unit},
    ),
}
# the roles: query, key, value, up (a feed-forward's way in), residual (what a sublayer adds to the stream), embedding, head,
# weight (the rest); what a role falls back to before `weight`
_GENERAL_ROLE = {"query": "qkv", "key": "qkv", "value": "qkv"}
ROLES = ("query", "key", "value", "up", "residual", "head", "embedding", "weight")


@torch.no_grad()
def init_weights(
    model: nn.Module,
    scheme: str = "gpt2",
    *,
    fold: str | None = None,
    num_layers: int = 1,
    gains: Mapping[str, float] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Draw the weights of ``model`` in place by a scheme of ``SCHEMES`` and return it.

    Every matrix takes one draw of its own shape from the generator, in the order of ``model.modules()``; arms that differ
    by a factor only (a fold, the score scale) therefore start from identical draws. Biases are zero unless the scheme
    says otherwise; norms, gains and learned scales return to their own start. A tied embedding is drawn once, as a head.

    Args:
        fold: ``query`` multiplies W_Q and its bias by D^-½; ``symmetric`` W_Q and W_K by D^-¼ each, so that unscaled
            logits start as scaled ones do.
        num_layers: depth, for ``gpt2``'s residual projections.
        gains: by role (``query``, ``key``, ``value``, ``up``, ``residual``, ``head``, ``embedding``, ``weight``), multiply
            what was drawn: DeepNorm's β on ``value``, ``up`` and ``residual``, or 0 on ``residual`` for blocks that start
            as the identity.
        generator: default torch's global one.

    Raises:
        ValueError: an unknown scheme, fold or role.

    >>> weight = init_weights(nn.Linear(400, 400), "lecun").weight
    >>> bool(abs(weight.std() * 20 - 1) < 0.05)
    True
    """
    if scheme not in SCHEMES:
        raise ValueError(f"init={scheme!r} must be one of {', '.join(SCHEMES)}")
    if fold not in (None, "query", "symmetric"):
        raise ValueError(f"init_fold={fold!r} must be None, 'query' or 'symmetric'")
    unknown = sorted(set(gains or {}) - set(ROLES))
    if unknown:
        raise ValueError(f"gains has unknown roles {unknown}; the roles are {', '.join(ROLES)}")
    draw = _Drawer(SCHEMES[scheme], num_layers, gains or {}, generator)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            draw.attention(module, fold)
        elif isinstance(module, FeedForward):
            for projection in (module.gate_proj, module.up_proj):
                draw.linear(projection, "up", module.up_proj.in_features)
            draw.linear(module.down_proj, "residual", module.up_proj.in_features)
        elif isinstance(module, MixtureOfExperts):
            for weights in (module.gate_proj, module.up_proj):
                draw.experts(weights, "up")
            draw.experts(module.down_proj, "residual")
        elif isinstance(module, LearnedPositions):
            draw.embedding(module.table, "embedding")
    for name, module in model.named_modules():  # what is left: embeddings, the head, norms, learned scales
        if isinstance(module, nn.Embedding):
            tied = any(getattr(other, "weight", None) is module.weight for other in model.modules() if other is not module)
            draw.embedding(module, "head" if tied else "embedding")
        elif isinstance(module, nn.Linear):
            draw.linear(module, "head" if name.endswith("head") else "weight", module.in_features)
        elif not isinstance(module, MultiHeadAttention | FeedForward) and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


class _Drawer:
    """Draws each weight once."""

    def __init__(self, scheme: Scheme, num_layers: int, gains: Mapping[str, float], generator: torch.Generator | None) -> None:
        self.scheme, self.num_layers, self.gains, self.generator = scheme, num_layers, gains, generator
        self.drawn: set[Tensor] = set()

    def attention(self, module: MultiHeadAttention, fold: str | None) -> None:
        """The four projections, with the fold on W_Q and W_K."""
        D = module.head_dim
        factors = {"query": {"q": D**-0.5}, "symmetric": {"q": D**-0.25, "k": D**-0.25}}.get(fold or "", {})
        self.linear(module.q_proj, "query", D, factors.get("q", 1.0))
        self.linear(module.k_proj, "key", D, factors.get("k", 1.0))
        self.linear(module.v_proj, "value", D)
        self.linear(module.out_proj, "residual", D)
        if module.sinks is not None:
            nn.init.zeros_(module.sinks)

    def linear(self, module: nn.Linear | None, role: str, head_dim: int, factor: float = 1.0) -> None:
        """W and b of one projection, times ``factor``."""
        if module is None or module.weight in self.drawn:
            return
        sizes = Sizes(module.in_features, module.out_features, head_dim, self.num_layers)
        self._draw(module.weight, role, sizes, factor)
        if module.bias is not None:
            std = self.scheme.bias(sizes) if self.scheme.bias else 0.0
            _fill(module.bias, std * factor * self.gains.get(role, 1.0), True, self.generator)

    def experts(self, weights: Tensor | None, role: str) -> None:
        """The stacked matrices (N, out, in) of a mixture, each as if it stood alone."""
        if weights is not None:
            self._draw(weights, role, Sizes(weights.shape[2], weights.shape[1], weights.shape[2], self.num_layers), 1.0)

    def embedding(self, module: nn.Embedding, role: str) -> None:
        """A table; fan-in is its width, as for the head that it may be tied to."""
        if module.weight not in self.drawn:
            sizes = Sizes(module.embedding_dim, module.num_embeddings, module.embedding_dim, self.num_layers)
            self._draw(module.weight, role, sizes, 1.0)

    def _draw(self, weight: Tensor, role: str, sizes: Sizes, factor: float) -> None:
        roles, factor = self.scheme.roles or {}, factor * self.gains.get(role, 1.0)
        role = role if role in roles else _GENERAL_ROLE.get(role, role)
        uniform = self.scheme.uniform and role != "embedding"
        _fill(weight, self.scheme.std(role, sizes), uniform, self.generator)
        weight.mul_(factor)  # after the draw, so that folded and unfolded arms differ by this factor exactly
        self.drawn.add(weight)


def _fill(tensor: Tensor, std: float, uniform: bool, generator: torch.Generator | None) -> None:
    if std == 0.0:
        nn.init.zeros_(tensor)
    elif uniform:
        bound = 3**0.5 * std
        nn.init.uniform_(tensor, -bound, bound, generator=generator)
    else:
        nn.init.normal_(tensor, 0.0, std, generator=generator)
