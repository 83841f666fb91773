"""QK-clip: after each update, W_Q and W_K of a head are divided if the head's largest logit in the batch was too large.

    γ_h = min(1, τ / S_h),    W_Q^h ← √γ_h · W_Q^h,    W_K^h ← √γ_h · W_K^h

S_h is the largest logit c · q·k of head h that a query saw in the step's batch (Kimi Team 2025, "Kimi K2", arXiv:2507.20534, §2.1: τ = 100).
The forward pass does not change.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.nn import MultiHeadAttention
from minitx.training.step_callback import StepCallback


class QKClip(StepCallback):
    """The callback. ``limit`` is τ. Each query head needs a key head of its own."""

    def __init__(self, limit: float = 100.0) -> None:
        self.limit, self.hooks = limit, ExitStack()
        self.largest: dict[MultiHeadAttention, Tensor] = {}  # (H,) of the step, by layer

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Watch the core of each layer."""
        for layer in module.network.modules():
            if isinstance(layer, MultiHeadAttention):
                if layer.num_kv_heads != layer.num_heads:
                    raise ValueError("QK-clip needs a key head for each query head: remove model.num_kv_heads")
                self.hooks.enter_context(layer.core.register_forward_pre_hook(partial(self.note, layer)))

    @torch.no_grad()
    def note(self, layer: MultiHeadAttention, core: nn.Module, arguments: Any) -> None:
        """Remember the largest logit of each head that a query sees in this step."""
        if layer.training:
            (call,), visible = arguments, arguments[0].visible()
            logits = call.scale * call.query @ call.key.mT  # (B, H, L, S)
            logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
            largest = logits.amax((0, 2, 3))
            self.largest[layer] = torch.maximum(largest, self.largest.get(layer, largest))

    @torch.no_grad()
    def on_step(self, trainer: Any, module: Any, step: int, batch: Any) -> None:
        """Divide the weights of heads above the limit."""
        for layer, largest in self.largest.items():
            factors = (self.limit / largest.clamp(min=self.limit)).sqrt()
            for parameter in (*layer.q_proj.parameters(), *layer.k_proj.parameters()):
                parameter.unflatten(0, (layer.num_heads, -1)).mul_(factors.view(-1, *[1] * parameter.dim()))
        self.largest.clear()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Stop watching."""
        self.hooks.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Stop watching."""
        self.hooks.close()
