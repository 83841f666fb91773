"""Muon: orthogonalised momentum for matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as fused_adamw

from minitx.nn.init import is_head
from minitx.nn.precision import widest_float

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def matrix_names(network: nn.Module) -> set[str]:
    """Return the names of the parameters for Muon: weights of ``torch.nn.Linear`` layers, unless the layer's name ends with ``head``.

    Layers with ``torch.nn.utils.parametrize`` are updated by AdamW, because their weight is not a parameter.
    """
    names = set()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and not is_head(name):
            names.add(f"{name}.weight".lstrip("."))
    return names


def orthogonalise(matrices: Sequence[Tensor], steps: int = 5) -> list[Tensor]:
    """Return approximately U Vᵀ for each matrix U S Vᵀ, or for each matrix of a stack (N, rows, cols), by Newton–Schulz iteration.

    X ← aX + b(XXᵀ)X + c(XXᵀ)²X, ``steps`` times. The singular values are then between about 0.7 and 1.2. This trains as well as
    exactly 1 (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"). Matrices of the same shape up to
    transposition are stacked to save time for small matrices. The computation is in bfloat16 on a GPU, and in the dtype of the
    matrices elsewhere.

    >>> matrices = torch.randn(2, 30, 7, generator=torch.Generator().manual_seed(0))
    >>> values = torch.linalg.svdvals(orthogonalise([matrices])[0])
    >>> bool((values > 0.5).all() and (values < 1.3).all())
    True
    """
    wide = [m.mT if m.shape[-2] > m.shape[-1] else m for m in matrices]
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, matrix in enumerate(wide):
        by_shape[tuple(matrix.shape[-2:])].append(i)
    done = list(matrices)
    for shape, members in by_shape.items():
        stacks = [wide[i].reshape(-1, *shape) for i in members]
        parts = _newton_schulz(torch.cat(stacks), steps).split([len(stack) for stack in stacks])
        for i, part in zip(members, parts, strict=True):
            result = part.reshape(wide[i].shape)
            done[i] = result if wide[i] is matrices[i] else result.mT
    return done


def product_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of Newton–Schulz products: bfloat16 on CUDA, where it is fast, else the dtype of the matrices."""
    return torch.bfloat16 if device == "cuda" else dtype


def _newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalise a stack (N, rows, cols) with rows ≤ cols."""
    a, b, c = COEFFICIENTS
    x = matrices.to(product_dtype(matrices.device.type, matrices.dtype))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices, and fused AdamW for the rest.

    For a matrix W of r rows and c columns with gradient g: M ← μM + (1 − μ)g; W ← W − lr · (decay · W + √max(1, r/c) ·
    orthogonalise((1 − μ)g + μM)). This equals ``torch.optim.Muon`` with its default adjustment, but matrices of equal shape
    are stacked into one product. AdamW is part of the same optimizer, so that both share a schedule, a checkpoint and a latch.

    Args:
        groups: parameter groups with ``lr``, ``weight_decay`` and ``eps``. Groups with ``matrix=True`` contain matrices, or
            stacks of them (N, r, c).
        betas: the betas of AdamW.
        momentum: μ.
        steps: number of Newton–Schulz iterations.

    As in torch's fused optimizers, the update is skipped if the tensor ``found_inf`` is 1.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], momentum: float = 0.95, steps: int = 5
    ) -> None:
        defaults = {"betas": betas, "momentum": momentum, "steps": steps, "matrix": False, "fused": True}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                (self._matrices if group["matrix"] else self._elementwise)(group, params, [p.grad for p in params])
        return loss

    def _elementwise(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                averages = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **averages}
        mean, square, step = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        options: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        options |= {"amsgrad": False, "maximize": False, "fused": True, "found_inf": self.found_inf}
        beta1, beta2 = group["betas"]
        fused_adamw(params, grads, mean, square, [], step, beta1=beta1, beta2=beta2, **options)

    def _matrices(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        go = 1.0
        for p in params:
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        momentum = group["momentum"]
        if (stop := self.found_inf) is not None:  # interpolating a buffer towards itself leaves it unchanged
            grads = [torch.where(stop.bool(), old, grad) for old, grad in zip(buffers, grads, strict=True)]
            go = 1.0 - stop.to(widest_float(stop.device))  # type: ignore[assignment]
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)
        for p, update in zip(params, orthogonalise(updates, group["steps"]), strict=True):
            p.mul_(1.0 - group["lr"] * group["weight_decay"] * go)
            p.sub_(update * (group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 * go))
