"""Position-wise feed-forward networks: plain, gated, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": F.relu,
}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")


class FeedForward(nn.Module):
    """The feed-forward network of a block: down(a(up(x))), or with a gate down(a(gate(x)) · up(x)).

    Input and output have shape (B, L, E). Without a gate: Vaswani et al. 2017, arXiv:1706.03762, §3.3. With a gate: Shazeer 2020,
    arXiv:2002.05202. ``relu2`` is the square of ReLU: So et al. 2021, arXiv:2109.08668.

    Args:
        embed_dim: E.
        ffn_dim: F, the hidden width.
        activation: ``gelu``, ``gelu_tanh`` (GPT-2's approximation), ``relu`` or ``relu2``. With a gate: ``swiglu`` (a = SiLU),
            ``geglu`` (GELU), ``geglu_tanh`` or ``reglu`` (ReLU).
        bias: whether the projections have biases.
        dropout: the dropout probability on the hidden layer in training.

    Raises:
        ValueError: an unknown activation, or a width below 1.

    >>> import torch
    >>> FeedForward(6, 24, activation="swiglu")(torch.randn(2, 5, 6)).shape
    torch.Size([2, 5, 6])
    """

    def __init__(
        self, embed_dim: int, ffn_dim: int, *, activation: str = "gelu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        _check_network(embed_dim, ffn_dim, activation)
        self.activation = activation
        self.gate_proj = nn.Linear(embed_dim, ffn_dim, bias=bias) if activation in GATED else None
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias=bias)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout) if dropout != 0.0 else None

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up_proj(x)) if self.gate_proj is None else activate(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden if self.dropout is None else self.dropout(hidden))


def _check_network(embed_dim: int, ffn_dim: int, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    if embed_dim < 1 or ffn_dim < 1:
        raise ValueError(f"embed_dim and ffn_dim must be positive, got {embed_dim} and {ffn_dim}")


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a router chooses k of N feed-forward networks for each token.

    y = Σ_{e in top-k} g_e · FFN_e(x), where g is the softmax over the k largest router logits (Shazeer et al. 2017,
    arXiv:1701.06538; Jiang et al. 2024, "Mixtral", arXiv:2401.04088, §2.1). Tokens are sorted by expert, and each expert
    computes only its own tokens. No token is dropped. The result for a token does not depend on the other tokens, except for
    rounding. Experts have no biases.

    Args:
        embed_dim: E.
        ffn_dim: F, the hidden width of one expert.
        num_experts: N.
        experts_per_token: k.
        activation: as in ``FeedForward``.
        dropout: the dropout probability on the hidden layer in training.

    Raises:
        ValueError: k outside 1 … N, an unknown activation, or a width below 1.

    >>> experts = MixtureOfExperts(6, 24, num_experts=4, experts_per_token=2)
    >>> out, probs, chosen = experts(torch.randn(2, 5, 6), return_routing=True)
    >>> out.shape, probs.shape, chosen.shape
    (torch.Size([2, 5, 6]), torch.Size([2, 5, 4]), torch.Size([2, 5, 2]))
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        *,
        num_experts: int,
        experts_per_token: int = 2,
        activation: str = "swiglu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_network(embed_dim, ffn_dim, activation)
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"experts_per_token={experts_per_token} must lie between 1 and num_experts={num_experts}")
        self.num_experts, self.experts_per_token, self.activation = num_experts, experts_per_token, activation
        self.router = nn.Linear(embed_dim, num_experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, embed_dim)) if activation in GATED else None
        self.up_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, embed_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, embed_dim, ffn_dim))
        self.dropout = nn.Dropout(dropout)
        for weight in (self.gate_proj, self.up_proj, self.down_proj):
            if weight is not None:  # as nn.Linear: U(±1/√fan_in)
                nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, L, E) for x (B, L, E). Other leading axes work, too.

        With ``return_routing``, return ``(output, probabilities, chosen)``: the router's probabilities (B, L, N) and the chosen
        experts (B, L, k).
        """
        logits = self.router(x).to(torch.promote_types(x.dtype, torch.float32))  # (B, L, N)
        top, chosen = logits.topk(self.experts_per_token, dim=-1)  # (B, L, k)
        order = chosen.flatten().argsort(stable=True)  # sorts the B·L·k pairs of token and expert by expert
        counts = chosen.new_zeros(self.num_experts).scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        rows = x.flatten(0, -2)[order // self.experts_per_token]  # (B·L·k, E)
        out = torch.empty_like(rows).index_copy(0, order, self._experts(rows, counts).to(rows.dtype))
        gates = top.softmax(-1).to(x.dtype).unsqueeze(-1)  # (B, L, k, 1)
        out = (out.view(*chosen.shape, x.shape[-1]) * gates).sum(-2)  # (B, L, k, E) -> (B, L, E)
        return (out, logits.softmax(-1), chosen) if return_routing else out

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows (T, E) that are sorted by expert. Returns (T, E)."""
        activate = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            hidden = activate(_grouped(rows, self.up_proj, counts))
        else:
            hidden = activate(_grouped(rows, self.gate_proj, counts)) * _grouped(rows, self.up_proj, counts)
        return _grouped(self.dropout(hidden), self.down_proj, counts)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, experts_per_token={self.experts_per_token}, activation={self.activation!r}"


def load_balancing_loss(probs: Tensor, chosen: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Return the load-balancing loss N · Σ_e f_e P_e.

    f_e is the share of the choices that expert e received. P_e is its mean router probability. Both are over the real tokens.
    The loss is 1 if all experts receive the same share, and N/k if k experts receive everything. The gradient flows through P.
    Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4-6, here with top-k choices.

    Args:
        probs: the router's probabilities, (B, L, N).
        chosen: the chosen experts, int (B, L, k).
        key_mask: bool (B, L), True = real token. Default: all tokens are real.

    >>> load_balancing_loss(torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]), torch.tensor([[[0], [1]]])).item()
    1.0
    """
    num_experts = probs.shape[-1]
    real = torch.ones_like(probs[..., 0]) if key_mask is None else key_mask.to(probs.dtype)  # (B, L)
    total = real.sum().clamp(min=1.0)
    picked = F.one_hot(chosen, num_experts).to(probs.dtype).mean(-2)  # (B, L, N): each token's choices sum to 1
    share = (picked * real.unsqueeze(-1)).sum((0, 1)) / total
    mean = (probs * real.unsqueeze(-1)).sum((0, 1)) / total
    return num_experts * (share * mean).sum()


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows (T, I) by its matrix: group e by weights[e]ᵀ, with weights (N, O, I). Returns (T, O)."""
    device = rows.device.type
    narrows = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # meta has no autocast
    dtype = torch.get_autocast_dtype(device) if narrows else rows.dtype
    return expert_matmul(rows.to(dtype), weights.to(dtype), counts)


# A custom operator, because the group sizes are data: slicing by them would break the compiler's graph. Reading them on the host
# waits for the GPU once for each product.
@torch.library.custom_op("minitx::expert_matmul", mutates_args=())
def expert_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows (T, I), sorted by expert, by weights (N, O, I). ``counts`` (N,) are the group sizes. Returns (T, O)."""
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    for group, result, weight in zip(rows.split(counts.tolist()), out.split(counts.tolist()), weights, strict=True):
        torch.mm(group, weight.T, out=result)
    return out


@torch.library.custom_op("minitx::expert_outer", mutates_args=())
def expert_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Return leftᵀ · right for each group of rows, (N, O, I), from left (T, O) and right (T, I)."""
    sizes = counts.tolist()
    return torch.stack([one.T @ two for one, two in zip(left.split(sizes), right.split(sizes), strict=True)])


@expert_matmul.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@expert_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _save_operands(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, counts = ctx.saved_tensors  # type: ignore[attr-defined]
    return expert_matmul(grad, weights.transpose(1, 2), counts), expert_outer(grad, rows, counts), None


def _outer_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, counts = ctx.saved_tensors  # type: ignore[attr-defined]
    return expert_matmul(right, grad, counts), expert_matmul(left, grad.transpose(1, 2), counts), None


expert_matmul.register_autograd(_matmul_backward, setup_context=_save_operands)
expert_outer.register_autograd(_outer_backward, setup_context=_save_operands)
