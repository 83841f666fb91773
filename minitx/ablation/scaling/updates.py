"""Further optimizers for the grids about the scale: Lion, Adam with relative steps, and Muon with a single rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from minitx.config import ConfigError
from minitx.config.schema import NotNegative, Positive, Share
from minitx.nn.attention import MultiHeadAttention
from minitx.training import optimizers
from minitx.training.optimizers import Rules, parameter_groups


class Direction(torch.optim.Optimizer):
    """W ← W − lr · d(g, state of W) for every parameter W with gradient g, without weight decay. Subclasses define d."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)

    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return d, and update the state of the parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(parameter, parameter.grad, group), alpha=group["lr"])
        return loss


class Lion(Direction):
    """d = sign(β₁ m + (1 − β₁) g), then m ← β₂ m + (1 − β₂) g, from m = 0 (Chen et al. 2023, arXiv:2302.06675)."""

    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return d, and update m."""
        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        beta1, beta2 = group["betas"]
        direction = torch.lerp(gradient, mean, beta1).sign()
        mean.lerp_(gradient, 1.0 - beta2)
        return direction


class RelativeAdam(Direction):
    """d = RMS(W) · m̂ / (√v̂ + ε), with Adam's bias-corrected moments m̂ and v̂, and RMS(W) the root mean square of the parameter.

    The step has no lower limit: a parameter that is zero stays zero. ``torch.optim.Adafactor`` also uses relative steps, but limits
    them to 1/√t, so that a search finds no unstable rate.
    """

    def direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return d, and update the moments."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
        state["step"] += 1
        state["mean"].lerp_(gradient, 1.0 - beta1)
        state["square"].lerp_(gradient.square(), 1.0 - beta2)
        mean, square = state["mean"] / (1.0 - beta1 ** state["step"]), state["square"] / (1.0 - beta2 ** state["step"])
        return parameter.square().mean().sqrt() * mean / (square.sqrt() + group["eps"])


def lion(
    network: nn.Module, *, lr: Positive = 1e-4, betas: tuple[Share, Share] = (0.9, 0.99), rules: Rules = (), head_dim: int = 1
) -> Lion:
    """``Lion`` for every parameter.

    Args:
        lr: the peak learning rate.
        betas: β₁ and β₂.
        rules, head_dim: see ``minitx.training.optimizers.adamw``.
    """
    return Lion(parameter_groups(network, lr=lr, rules=rules, head_dim=head_dim), betas=betas)


def relative_adam(
    network: nn.Module,
    *,
    lr: Positive = 1e-3,
    betas: tuple[Share, Share] = (0.9, 0.95),
    eps: Positive = 1e-8,
    rules: Rules = (),
    head_dim: int = 1,
) -> RelativeAdam:
    """``RelativeAdam`` for every parameter.

    Args:
        lr: the peak learning rate: the size of a step relative to the weights.
        betas, eps, rules, head_dim: see ``minitx.training.optimizers.adamw``.
    """
    return RelativeAdam(parameter_groups(network, lr=lr, eps=eps, rules=rules, head_dim=head_dim), betas=betas)


def muon(
    network: nn.Module, *, lr: Positive = 0.02, rest: NotNegative = 0.2, rules: Rules = (), head_dim: int = 1
) -> optimizers.Muon:
    """``minitx.training.optimizers.muon`` with a single rate: ``lr`` for the matrices of the blocks, and ``rest`` · ``lr`` for all other parameters (AdamW).

    Args:
        lr: the peak learning rate of the blocks' matrices.
        rest: factor on ``lr`` for embeddings, heads and vectors; 0.2 is the ratio of the defaults of ``optimizer=muon``.
        rules, head_dim: see ``minitx.training.optimizers.adamw``.
    """
    return optimizers.muon(network, lr=rest * lr, matrix_lr=lr, rules=rules, head_dim=head_dim)


class FoldIntoQueries(L.Callback):
    """At the start of a run, move the factor 1/√d_k from both W_Q and W_K into W_Q alone, without changing the function.

    ``init_from.fold_scale`` multiplies W_Q and W_K, and their biases, by d_k^-1/4 each if the model has no scale. This callback
    multiplies W_Q by d_k^-1/4 again, and W_K by d_k^1/4, as in T5's initial weights.

    Raises:
        ConfigError: a layer has a scale.
    """

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_step:  # a resumed run, whose checkpoint is already folded
            return
        for layer in module.network.modules():
            if isinstance(layer, MultiHeadAttention):
                if layer.scale.multiplier != 1.0:
                    raise ConfigError(f"callbacks: FoldIntoQueries needs model.scale=unscaled, got {layer.scale.scale}")
                factor = layer.scale.head_dim**0.25
                for projection, by in ((layer.q_proj, 1 / factor), (layer.k_proj, factor)):
                    for parameter in projection.parameters():
                        parameter.mul_(by)


class MultiplyMatrices(L.Callback):
    """At the start of a run, multiply every matrix by ``factor``: GPT-2's initial weights N(0, .02²) become N(0, (.02 · factor)²).

    Args:
        factor: the factor for embeddings, projections and heads. Vectors (biases, norms) do not change.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        for parameter in module.network.parameters() if trainer.global_step == 0 else ():
            if parameter.dim() > 1:
                parameter.mul_(self.factor)
