"""The core of an adopted attention module, and the function through which transformers calls it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config.schema import stated
from minitx.interop.adopted_fold import fold_adopted
from minitx.interop.call_tracker import CallTracker
from minitx.nn.attention import DotProductAttention
from minitx.nn.core_bases import OtherScale
from minitx.nn.functional import AttentionCall
from minitx.nn.scale import scale_multiplier

NAME = "minitx"
"""The name of our function in transformers' two registries. Nothing else is global to the process."""

UNSUPPORTED = ("indices", "block_indices", "sinks")
"""Arguments of transformers' attention functions that change the result in ways that our core does not support."""


class AdoptedCore(OtherScale, DotProductAttention):
    """The core of an adopted attention module. It has no parameters, so state dicts do not change.

    ``model_scale`` is the scale that the model used in the last call, and ``model_factor`` the part of it that the module had
    already multiplied into its queries. ``is_cross`` is whether the running attention module got other states for its keys.
    """

    def __init__(self, tracker: CallTracker, *, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.tracker = tracker
        self.scale = None
        self.model_scale, self.model_factor = 1.0, 1.0
        self.is_cross = False
        self.folds = []

    def set_scale(self, to: str | float, factor: float) -> None:
        super().set_scale(to, factor)
        self.tracker.is_scaled = True

    def fold(
        self, model: nn.Module, layers: Mapping[str, Any], to: str | float, factor: float, inputs: Mapping[str, Any] | None
    ) -> None:
        fold_adopted(model, layers, to, factor, inputs)


def adopted_cores(model: nn.Module) -> dict[str, Any]:
    """Return the adopted attention modules of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(getattr(module, "core", None), AdoptedCore)}


def check_cores(model: nn.Module) -> None:
    """Raise an error if attention whose scale was changed no longer passes through its core."""
    for name, module in adopted_cores(model).items():
        if module.core.scale is not None and (other := module.config._attn_implementation) != NAME:
            raise RuntimeError(
                f"the attention of {name or type(module).__name__} was set to {other!r} after its scale was changed, and would use the "
                f"old scale: call set_attn_implementation({NAME!r}) to keep the new scale, or release_hf(model) to restore the old scale"
            )


@dataclass(eq=False, slots=True)
class InterfaceCall:
    """The arguments of transformers' call of a function of its ``AttentionInterface``.

    Attributes:
        module: the attention module.
        query, key, value: (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv).
        attention_mask: the mask that transformers builds for ``sdpa``: None, bool (True = may attend), or a float that is added.
        scaling: the multiplier of q·k. None: D^-½.
        dropout: the probability of dropout.
        softcap: the soft-cap of the scores.
        s_aux: the logits of sinks.
        is_causal: whether a query sees no later keys, aligned at the upper left as in torch. None: the module decides.
        position_bias: a bias that is added to the scores.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    s_aux: Tensor | None = None
    is_causal: bool | None = None
    position_bias: Tensor | None = None

    def core(self) -> AdoptedCore:
        """Return the core of the module."""
        core: AdoptedCore | None = getattr(self.module, "core", None)
        if core is None:
            raise RuntimeError(
                f"{type(self.module).__name__} has no core: its model was built from the config of an adopted model, so call "
                "adopt_hf(model)"
            )
        return core

    def hides_later(self, core: AdoptedCore) -> bool:
        """Return whether the call is causal. Some modules rely on the mask from transformers (NLLB-MoE, Mllama)."""
        if self.is_causal is not None:
            return bool(self.is_causal)
        is_decoder = getattr(self.module, "is_decoder", False) and not core.is_cross
        return bool(getattr(self.module, "is_causal", False) or is_decoder)

    def num_keys(self, core: AdoptedCore, is_causal: bool) -> int:
        """Return the number of keys to use: a static cache also returns keys that are not written yet."""
        L, S = self.query.shape[2], self.key.shape[2]
        key_mask = core.tracker.call.key_masks[core.is_cross]
        if self.attention_mask is None:
            return min(L, S) if is_causal and L > 1 else S
        if is_causal and not core.is_cross and key_mask is not None and key_mask.shape[1] >= L:  # else it belongs to other keys
            return min(S, key_mask.shape[1])
        return S

    def bias(self, S: int) -> Tensor | None:
        """Return the bias of the scores of the first ``S`` keys."""
        parts = (self.position_bias, self.attention_mask)
        added = [part[..., :S] for part in parts if part is not None and part.dtype != torch.bool]
        return reduce(operator.add, added) if added else None

    def multiplier(self, core: AdoptedCore) -> float:
        """Return the multiplier of q·k that the core uses, and note the model's own multiplier in the core."""
        attribute = getattr(self.module, "scaling", None)
        # OPT and Whisper scale their queries first
        before = attribute if self.scaling == 1 and isinstance(attribute, float) else 1.0
        scaling = self.query.shape[-1] ** -0.5 if self.scaling is None else float(self.scaling)
        if not torch.compiler.is_compiling():
            core.model_scale, core.model_factor = scaling * before, before
        if core.scale is None:
            return scaling
        to, factor = core.scale
        return scale_multiplier(to, self.query.shape[-1]) * factor / before


ARGUMENTS = frozenset(field.name for field in fields(InterfaceCall))


def attention_function(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' attention functions do: (B, H, L, D) in, (B, L, H, Dv) and the weights or None out.

    The arguments are the fields of ``InterfaceCall``. Further arguments have no effect, except those that are ``UNSUPPORTED``.
    """
    call = InterfaceCall(*args, **{name: value for name, value in options.items() if name in ARGUMENTS})
    if unsupported := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise ValueError(
            f"{type(call.module).__name__} passes {unsupported[0]} to its attention function, but our core does not support it"
        )
    core = call.core()
    is_causal = call.hides_later(core)
    S = call.num_keys(core, is_causal)
    mask = core.tracker.mask(call.attention_mask, is_causal, (call.key.shape[0], S), core.is_cross)
    value = call.value[:, :, :S]
    query, key = call.query.to(value), call.key[:, :, :S].to(value)  # under autocast, rotary positions convert both to float32
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries have one row
    needs_weights = core.tracker.call.needs_weights
    settings: dict[str, Any] = {"dropout_p": call.dropout, "need_weights": needs_weights, "is_cross": core.is_cross}
    ours = AttentionCall(query, key, value, mask, call.bias(S), call.multiplier(core), call.softcap, call.s_aux, **settings)
    out, weights = core(ours) if needs_weights else (core(ours), None)
    return out.transpose(1, 2).contiguous(), weights


def mask_function(*, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """The mask that transformers builds for ``sdpa``.

    A causal mask is always built if layers share keys, because such layers may drop queries (Gemma 4).
    """
    from transformers.masking_utils import sdpa_mask

    shares_keys = bool(stated(config, "num_kv_shared_layers"))
    return sdpa_mask(**options, config=config, allow_is_causal_skip=allow_is_causal_skip and not shares_keys)
