"""Tokens at shapes that do not change: one compiled step and, on a GPU, one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.reader import has_source, last_logits, num_cached_layers, of_config
from minitx.nn import KVCache, StaticCache

LEAST = 64  # the smallest capacity; larger ones are powers of two, so that prompts of many lengths share one cache


class CompiledDecoder:
    """A causal model for ``generate`` whose tokens after the prompt are read by a compiled step.

    A small batch spends most of a token's time on starting kernels. Here the step is compiled (``minitx.nn.StaticCache`` keeps its
    shapes), and on CUDA recorded once and replayed: one start a token. The prompt is read by the model itself. The first
    answers compile, each for seconds to a minute: torch compiles the first batch size and capacity, and once it has seen that they change,
    a step for any. The cache and the recording of the latest batch size and capacity are kept. Keep this object from call to call.

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
        self.model = model
        self._run: Callable[..., Tensor] = torch.compile(last_logits, **options)
        self._step: _Step | None = None

    def start(self, cache: KVCache) -> Callable[[Tensor], Tensor]:
        """What reads the tokens after those in ``cache``: ids (B, 1) -> logits (B, V)."""
        capacity = max(LEAST, 1 << (cache.capacity - 1).bit_length())
        if of_config(self.model, "position") == "learned":
            capacity = min(capacity, of_config(self.model, "max_len"))
        if self._step is None or self._step.size != (cache.layers[0].num_rows, capacity):
            self._step = None  # free its cache first
            self._step = _Step(self.model, self._run, cache, capacity)
        self._step.cache.fill(cache)
        return self._step


class _Step:
    """ids (B, 1) -> logits (B, V), for one batch size and capacity."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor], cache: KVCache, capacity: int) -> None:
        self.model, self.run, self.size = model, run, (cache.layers[0].num_rows, capacity)
        self.cache = StaticCache(capacity, num_cached_layers(model))
        self.graph: torch.cuda.CUDAGraph | None = None
        device = next(model.parameters()).device
        if device.type == "cuda" and not of_config(model, "num_experts"):  # experts read on the host how many tokens each has
            self.ids = torch.zeros(self.size[0], 1, dtype=torch.long, device=device)
            self._record(cache)

    def _record(self, cache: KVCache) -> None:
        """Record what one call starts on the GPU; what the calls do to the cache is undone by the next ``fill``."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiling and choosing kernels must not be recorded
            for _ in range(3):
                self.cache.fill(cache)  # each call takes a slot, and there may be no more than one
                self.run(self.model, self.ids, cache=self.cache)
            self.cache.fill(cache)
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run(self.model, self.ids, cache=self.cache)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.graph is None:
            return self.run(self.model, ids, cache=self.cache)
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits.clone()
