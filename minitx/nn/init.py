"""Weight initialisation.

A scheme determines the initial standard deviation of the unscaled logits, σ_u = √D · E · σ_WQ · σ_WK for inputs of variance 1
(d_model = E, d_k = D). At D = 64 it is 8.0 for ``lecun`` and ``xavier``, 4.0 for ``torch_mha``, 2.7 for ``torch_linear``, 1 for
``t5``, and 0.41 for ``gpt2`` at E = 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minitx.nn.attention import MultiHeadAttention
from minitx.nn.core_bases import EfficientAttention
from minitx.nn.feedforward import FeedForward
from minitx.nn.positions import LearnedPositions


@dataclass(frozen=True)
class Sizes:
    """The sizes that a standard deviation may depend on."""

    fan_in: int
    fan_out: int
    head_dim: int
    num_layers: int


@dataclass(frozen=True)
class Scheme:
    """The standard deviation of each role, and whether weights are uniform or normal.

    Roles that are not in ``roles`` use ``weight``. ``bias`` is the standard deviation of biases; None means zero.
    """

    weight: Callable[[Sizes], float]
    uniform: bool = False
    roles: Mapping[str, Callable[[Sizes], float]] = field(default_factory=dict)
    bias: Callable[[Sizes], float] | None = None


def _fan_in(s: Sizes) -> float:
    return s.fan_in**-0.5


def _xavier(s: Sizes) -> float:
    return (2.0 / (s.fan_in + s.fan_out)) ** 0.5


def _torch_linear(s: Sizes) -> float:
    return (3 * s.fan_in) ** -0.5


def _unit(s: Sizes) -> float:
    return 1.0


SCHEMES: dict[str, Scheme] = {
    # Radford et al. 2019 (GPT-2): N(0, 0.02²), and residual projections divided by √(2 · layers)
    "gpt2": Scheme(lambda s: 0.02, roles={"residual": lambda s: 0.02 / (2 * s.num_layers) ** 0.5}),
    # LeCun et al. 1998, "Efficient BackProp": inputs of variance 1 give outputs of variance 1
    "lecun": Scheme(_fan_in, roles={"embedding": _unit}),
    # Glorot & Bengio 2010, with W_Q, W_K and W_V as separate matrices
    "xavier": Scheme(_xavier, uniform=True, roles={"embedding": _unit, "head": _fan_in}),
    # torch.nn.MultiheadAttention: Xavier on the stacked (3E, E) matrix; out_proj and other layers as nn.Linear
    "torch_mha": Scheme(
        _torch_linear,
        uniform=True,
        roles={**dict.fromkeys(("query", "key", "value"), lambda s: (2 * s.fan_in) ** -0.5), "embedding": _unit},
    ),
    # torch.nn.Linear: U(±1/√fan_in) for weights and biases
    "torch_linear": Scheme(_torch_linear, uniform=True, roles={"embedding": _unit}, bias=_torch_linear),
    # Raffel et al. 2020 (arXiv:1910.10683): the factor 1/√d_k is in W_Q, and attention is unscaled
    "t5": Scheme(_fan_in, roles={"query": lambda s: (s.fan_in * s.head_dim) ** -0.5, "embedding": _unit}),
}
# up: the first layers of a feed-forward network; residual: the last layer of a sublayer; weight: all others
ROLES = ("query", "key", "value", "up", "residual", "head", "embedding", "weight")


def is_head(name: str) -> bool:
    """Return whether the linear layer ``name`` maps to the outputs of a model. ``init_weights`` and Muon treat it in its own way."""
    return name.endswith("head")


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
    """Initialise the weights of ``model`` in place and return the model.

    Each matrix is one draw from the generator: first attention, feed-forward networks and learned positions in the order of
    ``model.modules()``, then the other modules. Two models that differ only by a factor, such as a fold or the score scale, therefore
    start from the same draws. Biases are zero unless the scheme initialises them. Norms, gains and learned scales are reset. A tied
    embedding is initialised once, as a head.

    Args:
        model: any module. Layers of this package get their role; other linear layers and embeddings are initialised too.
        scheme: ``gpt2``, ``lecun``, ``xavier``, ``torch_mha``, ``torch_linear`` or ``t5``.
        fold: put the factor 1/√D into the weights, so that unscaled logits start like scaled ones. ``query`` multiplies W_Q and
            its bias by D^-½. ``symmetric`` multiplies W_Q and W_K by D^-¼ each. With QK-norm, its gains are multiplied instead.
            Default: neither.
        num_layers: the depth, for the residual projections of ``gpt2``.
        gains: factors on the drawn weights, by role (``query``, ``key``, ``value``, ``up``, ``residual``, ``head``,
            ``embedding``, ``weight``). DeepNorm's β is a factor on ``value``, ``up`` and ``residual``. A factor of 0 on
            ``residual`` makes each sublayer start with the output 0.
        generator: for the draws. Default: torch's global generator.

    Raises:
        ValueError: an unknown scheme, fold or role; or a weight that is computed from other parameters (a parametrisation, weight
            norm, pruning).

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
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(module.weight, nn.Parameter):
            where = f"{name}.weight".lstrip(".")
            raise ValueError(f"{where} is computed from other parameters: wrap the layer after the model is initialised")
    draw = _Drawer(SCHEMES[scheme], num_layers, gains or {}, generator)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            draw.attention(module)
        elif isinstance(module, FeedForward):
            for layer, role in ((module.gate_proj, "up"), (module.up_proj, "up"), (module.down_proj, "residual")):
                draw.layer(layer, role)
        elif isinstance(module, LearnedPositions):
            draw.layer(module.table, "embedding")
    for name, module in model.named_modules():  # the other modules: embeddings, the head, norms, learned scales
        if isinstance(module, nn.Embedding):
            tied = any(getattr(other, "weight", None) is module.weight for other in model.modules() if other is not module)
            draw.layer(module, "head" if tied else "embedding")
        elif isinstance(module, nn.Linear):
            draw.layer(module, "head" if is_head(name) else "weight")
        elif isinstance(module, EfficientAttention):
            module.reset_parameters(generator)
        elif not isinstance(module, MultiHeadAttention | FeedForward) and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    if fold is not None:  # after the draws, so that folded and unfolded models differ by exactly this factor
        from minitx.nn.folding import fold_start

        fold_start(model, fold)
    return model


class _Drawer:
    """Initialises each weight once."""

    def __init__(self, scheme: Scheme, num_layers: int, gains: Mapping[str, float], generator: torch.Generator | None) -> None:
        self.scheme, self.num_layers, self.gains, self.generator = scheme, num_layers, gains, generator
        self.drawn: set[Tensor] = set()

    def attention(self, module: MultiHeadAttention) -> None:
        """Initialise the four projections."""
        for name, role in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "residual")):
            self.layer(getattr(module, f"{name}_proj"), role, head_dim=module.head_dim)
        if module.sinks is not None:
            nn.init.zeros_(module.sinks)

    def layer(self, module: nn.Linear | nn.Embedding | None, role: str, head_dim: int = 1) -> None:
        """Initialise a table, or a projection and its bias.

        The fan-in of a table is its width, as for a tied head.
        """
        if module is None or module.weight.is_meta:  # without numbers; torch takes longer for such a draw than for a real one
            return
        fan_out, fan_in = module.weight.shape
        sizes = Sizes(fan_in, fan_out, head_dim, self.num_layers)
        gain = self.gains.get(role, 1.0)
        bias = None if isinstance(module, nn.Embedding) else module.bias
        if module.weight not in self.drawn:
            std = self.scheme.roles.get(role, self.scheme.weight)
            _fill(module.weight, std(sizes), self.scheme.uniform and role != "embedding", self.generator)
            module.weight.mul_(gain)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        if bias is not None and bias not in self.drawn:  # even if the weight was drawn with a tied table
            _fill(bias, self.scheme.bias(sizes) * gain if self.scheme.bias else 0.0, True, self.generator)
        self.drawn |= {module.weight} if bias is None else {module.weight, bias}


def _fill(tensor: Tensor, std: float, uniform: bool, generator: torch.Generator | None) -> None:
    if std == 0.0:
        nn.init.zeros_(tensor)
    elif uniform:
        bound = 3**0.5 * std
        nn.init.uniform_(tensor, -bound, bound, generator=generator)
    else:
        nn.init.normal_(tensor, 0.0, std, generator=generator)
