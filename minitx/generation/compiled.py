"""Tokens at shapes that never change: one compiled step and, on a GPU, one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.reader import has_source, last_logits, num_cached_layers, of_config
from minitx.nn import KVCache, StaticCache

GRAIN = 64  # capacities are rounded up to a multiple, so that prompts of many lengths share one compiled step


class CompiledDecoder:
    """A causal model for ``generate`` whose tokens after the prompt are read by one compiled step.

    A small batch spends most of a token's time on starting kernels. Here the step is compiled at shapes that never change
    (``minitx.nn.StaticCache``), and on CUDA recorded once and replayed: one start a token. The prompt is read by the model
    itself. The first answer of each batch size and capacity compiles, which takes seconds to a minute; keep this object
    from call to call.

    Args:
        model: in eval mode; ``DecoderLM``, or another that takes ``cache``.
        options: of ``torch.compile``, such as ``mode="max-autotune-no-cudagraphs"``.

    Raises:
        ValueError: a model with a source, whose memory has a length of its own.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.generation import generate
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> fast = CompiledDecoder(model, backend="eager")
    >>> prompt = torch.tensor([[1, 2, 3]])
    >>> bool(torch.equal(generate(fast, prompt, max_new_tokens=5)[0], generate(model, prompt, max_new_tokens=5)[0]))
    True
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if has_source(model):
            raise ValueError("CompiledDecoder is for causal models: an encoder-decoder's memory has a length of its own")
        self.model, self.options = model, options
        self._steps: dict[tuple[int, int], _Step] = {}

    def start(self, cache: KVCache) -> Callable[[Tensor], Tensor]:
        """What reads the tokens after those in ``cache``: ids (B, 1) -> logits (B, V)."""
        capacity = -(-cache.capacity // GRAIN) * GRAIN
        if of_config(self.model, "position") == "learned":
            capacity = min(capacity, of_config(self.model, "max_len"))
        key = cache.layers[0].num_rows, capacity
        if key not in self._steps:
            self._steps[key] = _Step(self.model, cache, capacity, self.options)
        self._steps[key].cache.fill(cache)
        return self._steps[key]


class _Step:
    """ids (B, 1) -> logits (B, V), compiled for one batch size and capacity."""

    def __init__(self, model: nn.Module, cache: KVCache, capacity: int, options: dict[str, Any]) -> None:
        self.model, self.cache = model, StaticCache(capacity, num_cached_layers(model))
        self.ids = torch.zeros(cache.layers[0].num_rows, 1, dtype=torch.long, device=next(model.parameters()).device)
        self.run: Callable[[], Tensor] = torch.compile(self._read, dynamic=False, **options)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.ids.is_cuda and not of_config(model, "num_experts"):  # experts read on the host how many tokens each has
            self.cache.fill(cache)
            self._record()

    def _read(self) -> Tensor:
        return last_logits(self.model, self.ids, cache=self.cache)

    def _record(self) -> None:
        """Record what one call starts on the GPU; what the calls do to the cache is undone by the next ``fill``."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiling and choosing kernels must not be recorded
            for _ in range(3):
                self.run()
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run()

    def __call__(self, ids: Tensor) -> Tensor:
        self.ids.copy_(ids)
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.logits.clone()
