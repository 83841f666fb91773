"""Attention other than scaled dot-product attention.

Each class is a core of ``MultiHeadAttention``: ``MultiHeadAttention(E, H, core=LinearAttention())``. Linear attention, Performer and
Linformer cost less than L × S. ``approximation_error`` measures their error against exact attention. Additive attention is an older
baseline that costs more.

Sliding windows and block-sparse patterns are masks (``SlidingWindow``, ``BlockSparse``). The ``chunked`` backend skips the tiles that
they hide.
"""

from __future__ import annotations

from dataclasses import replace
from math import copysign, log, sqrt
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.nn.cache import StateCache
from minitx.nn.core_bases import EfficientAttention
from minitx.nn.functional import AttentionCall, hide_unseen, make_call, reference_attention, with_weights
from minitx.nn.masks import Mask, simplify
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision, widest_float


@torch.no_grad()
def approximation_error(
    core: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None = None, scale: float | None = None
) -> dict[str, float | Tensor]:
    """Measure the error of ``core`` against exact softmax attention on these inputs.

    The relative error is ‖core − exact‖_F / ‖exact‖_F. The exact output is computed by ``reference_attention`` in
    float64, or in float32 on a device without float64. It stores L × S scores. The core runs in evaluation mode.

    Args:
        core: the attention core to measure.
        query: (B, H, L, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        mask: the mask of both computations. None hides nothing.
        scale: the multiplier on q·k in both computations. None: 1/√D.

    Returns:
        ``relative_error`` and ``max_abs_error`` as floats, ``relative_error_per_head`` and ``max_abs_error_per_head`` as
        tensors (H,). If the exact output is zero, the relative error is 0 for a zero output and infinite for any other.

    >>> from minitx.nn.efficient import LinearAttention
    >>> q, k, v = torch.zeros(3, 1, 2, 9, 4).unbind()  # equal scores: both give the mean of the values
    >>> error = approximation_error(LinearAttention(), q, k, v + 1.0)
    >>> error["relative_error"] < 1e-6, error["relative_error_per_head"].shape
    (True, torch.Size([2]))
    """
    call = make_call(query, key, value, mask, scale=scale)
    with evaluating(core):
        got = core(call)
    wide = widest_float(query.device)
    exact = reference_attention(replace(call, query=query.to(wide), key=key.to(wide), value=value.to(wide)))
    gap = got.to(wide) - exact
    gaps, sizes = (tensor.square().sum((0, 2, 3)) for tensor in (gap, exact))  # (H,)
    worst = gap.abs().amax((0, 2, 3))
    return {
        "relative_error": _ratio(gaps.sum(), sizes.sum()).item(),
        "max_abs_error": worst.max().item(),
        "relative_error_per_head": _ratio(gaps, sizes),
        "max_abs_error_per_head": worst,
    }


def _ratio(gap: Tensor, size: Tensor) -> Tensor:
    return torch.where(gap == 0, 0.0, gap / size).sqrt()


class AdditiveAttention(nn.Module):
    """Additive attention: softmax(z) V with z_ij = c · vᵀ tanh(W q_i + U k_j).

    Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", arXiv:1409.0473, §A.1.2. W, U and v
    are shared by the heads of a layer. The paper has no scale: use ``scale="unscaled"`` for c = 1. |z| is at most |c| Σ|v| for any D.
    Britz et al. 2017 (arXiv:1703.03906, §4.5) compare it with dot products.

    It supports every option of ``DotProductAttention``. Soft-cap, bias, mask, sinks and dropout act on z as they act on scores there.
    It computes B · H · L · S · m values of tanh and stores all of them at once.

    Args:
        head_dim: D.
        hidden_dim: m, the width of the network. Default: D.

    Shapes: query (B, H, L, D), key (B, Hkv, S, D) and value (B, Hkv, S, Dv) give (B, H, L, Dv), and weights (B, H, L, S) if the call
    has ``need_weights``.

    Raises:
        ValueError: a width below 1.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, scale="unscaled", core=AdditiveAttention(head_dim=4))
    >>> attention(torch.randn(2, 5, 12), is_causal=True).shape
    torch.Size([2, 5, 12])
    """

    def __init__(self, head_dim: int, hidden_dim: int | None = None) -> None:
        super().__init__()
        width = head_dim if hidden_dim is None else hidden_dim
        if min(head_dim, width) < 1:
            raise ValueError(f"head_dim and hidden_dim must be positive, got {head_dim} and {hidden_dim}")
        self.query_map = nn.Linear(head_dim, width, bias=False)  # W
        self.key_map = nn.Linear(head_dim, width, bias=False)  # U
        self.energy = nn.Linear(width, 1, bias=False)  # v

    def forward(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output (B, H, L, Dv), or ``(output, weights)`` if the call has ``need_weights``."""
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        group = call.query.shape[1] // call.key.shape[1]
        with full_precision(call.query.device):
            attn_bias = call.dense_bias()
            key = hide_unseen(call.key, call.visible(attn_bias)).to(dtype).repeat_interleave(group, dim=1)
            q = _in_wide_dtype(self.query_map, call.query.to(dtype))  # (B, H, L, m)
            k = _in_wide_dtype(self.key_map, key)  # (B, H, S, m)
            sums = q.unsqueeze(3) + k.unsqueeze(2)  # (B, H, L, S, m)
            scores = _in_wide_dtype(self.energy, torch.tanh(sums)).squeeze(-1) * call.scale  # (B, H, L, S)
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            scores = scores if attn_bias is None else scores + attn_bias.to(dtype)
        call = replace(call, scores=scores)
        output = reference_attention(call)
        return with_weights(call, output) if call.need_weights else output


def _in_wide_dtype(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``layer(x)`` with its parameters in the dtype of x. The layer itself is called, so LoRA, pruning and int8 take effect."""
    wide = {name: parameter.to(x.dtype) for name, parameter in layer.named_parameters() if parameter.dtype != x.dtype}
    return torch.func.functional_call(layer, wide, (x,)) if wide else layer(x)


class LinformerAttention(EfficientAttention):
    """Linformer attention: softmax(c · Q (E K)ᵀ) (F V) with learned E and F of shape (k, max_len).

    Wang et al. 2020, "Linformer", arXiv:2006.04768, §4, eq. 7. The heads of a layer share E and F ("headwise sharing"). E and F mix the
    S keys and values into k slots. They are parameters of this core, ``key_mix`` and ``value_mix``. Their columns belong to positions:
    S may not exceed ``max_len``, and a shorter S uses the first S columns.

    Soft-cap and sinks act on the scores of slots, dropout on the weights of slots. The only supported mask is ``Padding``: padded
    keys and values are set to zero before mixing. Padding at the end therefore does not change the output. Other masks,
    ``attn_bias`` and ``need_weights`` are not supported, because a slot mixes all positions.

    Cost: (L + S) · k · (D + Dv) multiplications, and L · k stored scores. It is linear in the length.

    Args:
        max_len: the largest S.
        num_slots: k. With k = max_len = S and identity matrices for E and F, attention is exact.

    Raises:
        ValueError: an option that is not supported, a size below 1, or more than ``max_len`` keys.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, core=LinformerAttention(max_len=50, num_slots=8))
    >>> attention(torch.randn(2, 50, 12)).shape
    torch.Size([2, 50, 12])
    """

    refusals: ClassVar[dict[str, str]] = {
        "attn_bias": "it computes scores for slots that mix all positions, not for keys",
        "need_weights": "its weights belong to slots that mix all positions, not to keys",
    }

    def __init__(self, max_len: int, num_slots: int) -> None:
        super().__init__()
        if max_len < 1 or num_slots < 1:
            raise ValueError(f"max_len and num_slots must be positive, got {max_len} and {num_slots}")
        self.max_len, self.num_slots = max_len, num_slots
        self.key_mix = nn.Parameter(torch.empty(num_slots, max_len))
        self.value_mix = nn.Parameter(torch.empty(num_slots, max_len))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw E and F from N(0, 1/max_len), so that a slot has the variance of a key. The paper's theorems use N(0, 1/k)."""
        for mix in (self.key_mix, self.value_mix):
            nn.init.normal_(mix, 0.0, self.max_len**-0.5, generator=generator)

    def attend(self, call: AttentionCall) -> Tensor:
        key, value = call.key, call.value
        causal, key_mask = self.causal_and_padding(call.mask)
        if causal:
            raise ValueError(
                "LinformerAttention does not support is_causal: each slot mixes all positions, including those after a query"
            )
        num_keys = key.shape[2]
        if num_keys > self.max_len:
            raise ValueError(f"LinformerAttention takes at most max_len={self.max_len} keys, got {num_keys}")
        if key_mask is not None:
            key, value = (hide_unseen(x, key_mask[:, None, None]) for x in (key, value))
        slots = self.key_mix[:, :num_keys].to(key.dtype) @ key  # (k, S) · (B, Hkv, S, D) -> (B, Hkv, k, D)
        contents = self.value_mix[:, :num_keys].to(value.dtype) @ value  # (B, Hkv, k, Dv)
        return reference_attention(replace(call, key=slots, value=contents, mask=None))

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, num_slots={self.num_slots}"


class KernelisedAttention(EfficientAttention):
    """The base of kernelised cores: exp(c · q·k) is replaced by φ(q)·φ(k), so that the sum over keys does not depend on the query.

        o_i = φ(q_i) · (Σ_j φ(k_j) v_jᵀ) / (φ(q_i) · Σ_j φ(k_j))

    With m features the cost is (L + S) · m · Dv instead of L · S · D. In causal attention the sums run up to j = i. They are computed in
    chunks: the keys of earlier chunks are summed into one m × Dv state, and the keys of the same chunk are weighted by a small causal
    matrix φ(q_i)·φ(k_j). An L × S matrix is never stored. Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236,
    §3.2–3.3 (eqs. 4–12). Subclasses define ``log_features``, the logarithms of φ.

    exp is taken relative to the largest feature of each position, so that large queries or keys do not overflow. The factor cancels in
    the quotient. The output is zero for a query without a visible key, and for a query whose relative sum of weights is below √tiny
    (1e-19 in float32). In causal attention, the factor of a row depends only on the keys up to that row, so later tokens never change
    earlier outputs.

    Args:
        chunk_size: the number of positions that causal attention computes at a time. It does not change the result.

    Raises:
        ValueError: ``chunk_size`` is not a positive whole number.
    """

    refusals: ClassVar[dict[str, str]] = {
        "dropout": "it computes no weights",
        "softcap": "it computes no scores",
        "attn_bias": "it computes no scores for pairs of positions",
        "sinks": "it computes no softmax",
        "need_weights": "it computes no weights over keys",
    }

    def __init__(self, *, chunk_size: int = 64) -> None:
        super().__init__()
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")
        self.chunk_size = chunk_size

    def log_features(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return ln φ(query) (B, H, L, m) and ln φ(key) (B, Hkv, S, m), so that φ(q)·φ(k) stands for exp(scale · q·k)."""
        raise NotImplementedError(f"{type(self).__name__} must define log_features()")

    def make_cache(self, capacity: int) -> StateCache:
        """Return a cache that keeps the state (B, Hkv, m, Dv + 1) instead of keys and values."""
        return StateCache(capacity)

    def attend(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        causal, key_mask = self.causal_and_padding(simplify(call.mask, query.shape[2], key.shape[2]))
        if call.state is not None and not causal and query.shape[2] > 1:
            raise ValueError(f"{type(self).__name__} needs is_causal=True to read several tokens with a cache")
        if key_mask is not None:
            key, value = (hide_unseen(x, key_mask[:, None, None]) for x in (key, value))  # padding may be NaN
        log_query, log_key = self.log_features(query, key, call.scale)
        phi_q = (log_query - log_query.detach().amax(-1, keepdim=True)).exp()
        phi_q = phi_q.unflatten(1, (key.shape[1], -1))  # (B, Hkv, G, L, m): query heads grouped by their key head
        peak = log_key.detach().amax(-1)  # (B, Hkv, S): phi_k * exp(peak) is φ(k)
        phi_k = (log_key - peak.unsqueeze(-1)).exp()
        if key_mask is not None:
            peak = peak.masked_fill(~key_mask[:, None], -torch.inf)
        extended = F.pad(value, (0, 1), value=1.0)  # the sum over a column of ones is the denominator
        if causal or call.state is not None:
            sums = self._causal(phi_q, phi_k, peak, extended, call.state)
        else:
            sums = _apply_state(phi_q, _summary(phi_k, peak, extended)[0])
        total = sums[..., -1:]
        empty = total <= torch.finfo(total.dtype).tiny ** 0.5
        return (sums[..., :-1] / total.masked_fill(empty, 1.0)).masked_fill(empty, 0.0).flatten(1, 2)  # (B, H, L, Dv)

    def _causal(self, phi_q: Tensor, phi_k: Tensor, peak: Tensor, value: Tensor, kept: StateCache | None) -> Tensor:
        """Return the sums over keys up to i + S − L for each row i, divided by exp(their largest peak): (B, Hkv, G, L, Dv)."""
        before = phi_k.shape[2] - phi_q.shape[3]  # keys that every query sees
        if kept is None or kept.state is None:
            state, top = _summary(phi_k[:, :, :before], peak[:, :, :before], value[:, :, :before])
        else:
            state, top = kept.state
        highest = torch.maximum(peak.cummax(-1).values, top)  # (B, Hkv, S)
        # split once, because each slice in the loop would have a gradient as long as the sequence
        chunks = [x[:, :, before:].split(self.chunk_size, dim=2) for x in (phi_k, value, peak, highest)]
        rows = []
        for q, k, v, peaks, high in zip(phi_q.split(self.chunk_size, dim=3), *chunks, strict=True):
            future = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
            factor = (peaks.unsqueeze(-2) - high.unsqueeze(-1)).exp().masked_fill(future, 0.0)  # (B, Hkv, c, c)
            near = (q @ k.unsqueeze(2).transpose(-1, -2) * factor.unsqueeze(2)) @ v.unsqueeze(2)
            rows.append(near + _apply_state(q, state) * (top - high).exp()[:, :, None, :, None])
            now = high[..., -1:]
            gained = (k * (peaks - now).exp().unsqueeze(-1)).transpose(-1, -2) @ v
            state, top = state * (top - now).exp().unsqueeze(-1) + gained, now
        if kept is not None:
            kept.write(phi_q.shape[3], (state, top))
        return torch.cat(rows, dim=3)

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}"


def _summary(phi_k: Tensor, peak: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state Σ_j φ(k_j) v_jᵀ / exp(top) (B, Hkv, m, Dv) and top, the largest peak (B, Hkv, 1)."""
    lowest = torch.finfo(peak.dtype).min  # instead of -inf, so that differences are never NaN
    top = peak.amax(-1, keepdim=True).clamp(min=lowest) if peak.shape[-1] else peak.new_full((*peak.shape[:2], 1), lowest)
    return (phi_k * (peak - top).exp().unsqueeze(-1)).transpose(-1, -2) @ value, top


def _apply_state(phi_q: Tensor, state: Tensor) -> Tensor:
    """Multiply φ(q) (B, Hkv, G, L, m) by a state (B, Hkv, m, Dv) that the query heads of a group share."""
    return phi_q @ state.unsqueeze(2)


class LinearAttention(KernelisedAttention):
    """Linear attention: o_i = Σ_j φ(c q_i)·φ(k_j) v_j / Σ_j φ(c q_i)·φ(k_j) with φ(x) = elu(x) + 1.

    Katharopoulos et al. 2020, arXiv:2006.16236, §3.2, eq. 7. This is another similarity, not an approximation of softmax attention.
    The paper has no scale: use ``scale="unscaled"`` for c = 1. Any finite c works, including negative values.

    It supports ``Causal``, ``Padding`` and both together, grouped heads, Dv ≠ D and cross-attention. It does not support other masks,
    ``attn_bias``, ``sinks``, ``need_weights``, dropout or soft-cap.

    Cost: (L + S) · D · Dv multiplications, and L · chunk_size · (D + Dv) more if causal. It is linear in the length.

    Args:
        chunk_size: the number of positions that causal attention computes at a time. It does not change the result.

    Raises:
        ValueError: an option that is not supported, or ``chunk_size`` below 1.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, core=LinearAttention())
    >>> attention(torch.randn(2, 50, 12), is_causal=True).shape
    torch.Size([2, 50, 12])
    """

    def log_features(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return _log_elu_plus_one(query * scale), _log_elu_plus_one(key)


def _log_elu_plus_one(x: Tensor) -> Tensor:
    """Return ln(elu(x) + 1): x for x < 0 and ln(1 + x) otherwise."""
    return x.clamp(max=0.0) + x.relu().log1p()


class PerformerAttention(KernelisedAttention):
    """Performer attention: an estimate of softmax attention with m positive random features (FAVOR+).

        φ(x)_f = exp(ω_f·x − |x|²/2) / √m,   ω_f ~ N(0, I_D)   so that   E[φ(q')·φ(k')] = exp(q'·k')

    with q' = sign(c) √|c| q and k' = √|c| k, so that q'·k' = c q·k for any finite scale c. Choromanski et al. 2021, "Rethinking
    Attention with Performers", arXiv:2009.14794, §2.3 (Lemma 1, positive features) and §2.4 (orthogonal features).

    The estimate of exp(q'·k') is unbiased. The error of the output falls like 1/√m and grows like exp(|q' + k'|² / 2), so it is small
    only if |c| (|q|² + |k|²) is small. For entries of variance 1 and c = 1/√D this is 2√D, too large at D = 64. Normalise
    queries and keys (``qk_norm``), and measure the error with ``approximation_error``.

    It supports the same options as ``LinearAttention``.

    Cost: (L + S) · m · (D + Dv) multiplications, and L · chunk_size · (m + Dv) more if causal. It is linear in the length.

    Args:
        head_dim: D.
        num_features: m. Default: D · ln D, rounded up (the order in the paper's Theorem 4).
        orthogonal: draw ω in blocks of D orthogonal vectors. This lowers the variance of the estimate.
        generator: for the draw. Default: torch's global generator.
        chunk_size: as in ``LinearAttention``.

    Attributes:
        projection: ω for all heads, (m, D): a persistent buffer that is not trained.

    Raises:
        ValueError: an option that is not supported, a size below 1, or a query whose width is not ``head_dim``.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(12, 3, core=PerformerAttention(head_dim=4, num_features=32))
    >>> attention(torch.randn(2, 50, 12), is_causal=True).shape
    torch.Size([2, 50, 12])
    """

    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int | None = None,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        chunk_size: int = 64,
    ) -> None:
        super().__init__(chunk_size=chunk_size)
        num_features = int(head_dim * log(max(head_dim, 2))) + 1 if num_features is None else num_features
        if head_dim < 1 or num_features < 1:
            raise ValueError(f"head_dim and num_features must be positive, got {head_dim} and {num_features}")
        self.head_dim, self.num_features, self.orthogonal = head_dim, num_features, orthogonal
        self.register_buffer("projection", torch.empty(num_features, head_dim))
        self.redraw(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw ω."""
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw a new ω in place, for example to average the error over training (resampling, §2.4)."""
        draw = _orthogonal_gaussian if self.orthogonal else _gaussian
        self.projection.copy_(draw(self.num_features, self.head_dim, generator))

    def log_features(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if query.shape[-1] != self.head_dim:
            raise ValueError(f"query must have the width head_dim = {self.head_dim}, got {query.shape[-1]}")
        root = sqrt(abs(scale))
        return self._log_phi(query * copysign(root, scale)), self._log_phi(key * root)

    def _log_phi(self, x: Tensor) -> Tensor:
        """Return ω·x − |x|²/2 − ½ ln m, (..., m), for x (..., D)."""
        projected = x @ self.projection.to(x.dtype).T
        return projected - 0.5 * x.square().sum(-1, keepdim=True) - 0.5 * log(self.num_features)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, num_features={self.num_features}, orthogonal={self.orthogonal}, {super().extra_repr()}"


def _gaussian(num_features: int, head_dim: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(num_features, head_dim, generator=generator)


def _orthogonal_gaussian(num_features: int, head_dim: int, generator: torch.Generator | None) -> Tensor:
    """Draw rows that are each N(0, I_D), and orthogonal to each other within blocks of D.

    The columns of Q are multiplied by the signs of R's diagonal. Without this, Q is not uniformly distributed and the estimate is
    biased (Mezzadri 2007, arXiv:math-ph/0609050, §4).
    """
    blocks = []
    for start in range(0, num_features, head_dim):
        q, r = torch.linalg.qr(_gaussian(head_dim, head_dim, generator).double())
        directions = (q * r.diagonal().sign()).T[: num_features - start]
        lengths = _gaussian(len(directions), head_dim, generator).double().norm(dim=1, keepdim=True)
        blocks.append(directions * lengths)
    return torch.cat(blocks).float()


def build_core(
    kind: str, *, head_dim: int, max_len: int, num_features: int | None = None, num_slots: int | None = None
) -> AdditiveAttention | EfficientAttention:
    """Build an attention core by its name in a config.

    Args:
        kind: ``additive``, ``linear``, ``performer`` or ``linformer``.
        head_dim: D.
        max_len: the longest sequence, for ``linformer``.
        num_features: m of ``performer``. None: D · ln D, rounded up.
        num_slots: k of ``linformer``, required there.

    Raises:
        ValueError: an unknown kind, a missing option, an option of another kind, or a number out of range.

    >>> build_core("performer", head_dim=4, max_len=8, num_features=32)
    PerformerAttention(4, num_features=32, orthogonal=True, chunk_size=64)
    """
    for name, count, taker in (("num_features", num_features, "performer"), ("num_slots", num_slots, "linformer")):
        if count is not None and kind != taker:
            raise ValueError(f"{name}={count} is an option of attention={taker!r} only, got attention={kind!r}")
    if kind == "additive":
        return AdditiveAttention(head_dim)
    if kind == "linear":
        return LinearAttention()
    if kind == "performer":
        return PerformerAttention(head_dim, num_features=num_features)
    if kind != "linformer":
        raise ValueError(f"attention={kind!r} must be one of additive, linear, performer, linformer")
    if num_slots is None:
        raise ValueError("attention='linformer' needs num_slots, got num_slots=None")
    return LinformerAttention(max_len, num_slots)
