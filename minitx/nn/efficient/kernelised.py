"""Kernelised attention: exp(c · q·k) is replaced by φ(q)·φ(k), so that the sum over keys does not depend on the query.

    o_i = φ(q_i) · (Σ_j φ(k_j) v_jᵀ) / (φ(q_i) · Σ_j φ(k_j))

With m features the cost is (L + S) · m · Dv instead of L · S · D. In causal attention the sums run up to j = i. They are computed in
chunks: the keys of earlier chunks are summed into one m × Dv state, and the keys of the same chunk are weighted by a small causal
matrix φ(q_i)·φ(k_j). An L × S matrix is never stored.

Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, §3.2–3.3 (eqs. 4–12).
"""

from __future__ import annotations

from math import copysign, log, sqrt
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minitx.nn.cache import StateCache
from minitx.nn.efficient.base import EfficientAttention
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import simplify


class KernelisedAttention(EfficientAttention):
    """The base of kernelised cores. Subclasses define ``log_features``, the logarithms of φ.

    exp is taken relative to the largest feature of each position, so that large queries or keys do not overflow. The factor cancels in
    the quotient. The output is zero for a query without a visible key, and for one whose sum of weights is below √tiny (1e-19 in
    float32) of the largest possible. In causal attention, the factor of a row depends on keys up to that row only, so later tokens
    never change the output of earlier ones.
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
            hidden = ~key_mask[:, None, :, None]
            key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)  # padding may be NaN
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
        for q, k, v, own, high in zip(phi_q.split(self.chunk_size, dim=3), *chunks, strict=True):
            future = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
            factor = (own.unsqueeze(-2) - high.unsqueeze(-1)).exp().masked_fill(future, 0.0)  # (B, Hkv, c, c)
            near = (q @ k.unsqueeze(2).transpose(-1, -2) * factor.unsqueeze(2)) @ v.unsqueeze(2)
            rows.append(near + _apply_state(q, state) * (top - high).exp()[:, :, None, :, None])
            now = high[..., -1:]
            gained = (k * (own - now).exp().unsqueeze(-1)).transpose(-1, -2) @ v
            state, top = state * (top - now).exp().unsqueeze(-1) + gained, now
        if kept is not None:
            kept.state = state, top
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
    The paper has no scale: use ``scale="unscaled"`` for c = 1. Any finite c works, also a negative one.

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
    """Return ln(elu(x) + 1), which is x for x < 0 and ln(1 + x) otherwise."""
    return x.clamp(max=0.0) + x.relu().log1p()


class PerformerAttention(KernelisedAttention):
    """Performer attention: an estimate of softmax attention with m positive random features (FAVOR+).

        φ(x)_f = exp(ω_f·x − |x|²/2) / √m,   ω_f ~ N(0, I_D)   so that   E[φ(q')·φ(k')] = exp(q'·k')

    with q' = sign(c) √|c| q and k' = √|c| k, so that q'·k' = c q·k for any finite scale c. Choromanski et al. 2021, "Rethinking
    Attention with Performers", arXiv:2009.14794, §2.3 (Lemma 1, positive features) and §2.4 (orthogonal features).

    The estimate of exp(q'·k') is unbiased. The error of the output falls like 1/√m and grows like exp(|q' + k'|² / 2), so it is small
    only if |c| (|q|² + |k|²) is small. For entries of variance 1 and c = 1/√D this is 2√D, which is too large at D = 64. Normalise
    queries and keys (``qk_norm``), and measure the error with ``approximation_error``.

    It supports the same options as ``LinearAttention``.

    Cost: (L + S) · m · (D + Dv) multiplications, and L · chunk_size · (m + Dv) more if causal. It is linear in the length.

    Args:
        head_dim: D.
        num_features: m. Default: D · ln D, rounded up, the order of the paper's Theorem 4.
        orthogonal: draw ω in blocks of D orthogonal vectors. This lowers the variance of the estimate.
        generator: for the draw. Default: torch's global generator.
        chunk_size: as in ``LinearAttention``.

    Attributes:
        projection: ω for all heads, (m, D): a persistent buffer that is not trained.

    Raises:
        ValueError: an option that is not supported, a size below 1, or a query of another width than ``head_dim``.

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
