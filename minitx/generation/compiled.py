"""``CompiledDecoder``: decode with a compiled step of fixed shapes and, on a GPU, a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.reader import has_source, last_logits, num_cached_layers, of_config
from minitx.nn import KVCache, StaticCache

LEAST = 64  # the smallest capacity; others are larger powers of two, so that prompts of different lengths share one cache


class CompiledDecoder:
    """A causal model with a compiled decoding step. Pass it to ``generate`` in place of the model.

    With a small batch, most of the time of a decoding step is spent on launching kernels. ``torch.compile`` reduces their number, and
    on CUDA the step is recorded as a CUDA graph, which is one launch. The prompt is not compiled.

    Use one object for many calls. The first call takes seconds to a minute, because torch compiles the step for its batch size and
    cache capacity. When these change, torch compiles once more, for any sizes. The object keeps one cache, for the latest sizes.

    Args:
        model: ``DecoderLM`` or another causal model that takes ``cache``, in evaluation mode.
        options: arguments of ``torch.compile``, such as ``mode="max-autotune-no-cudagraphs"``.

    Raises:
        ValueError: the model is an encoder–decoder.

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
            raise ValueError("CompiledDecoder needs a causal model, got an encoder-decoder")
        self.model = model
        self._run: Callable[..., Tensor] = torch.compile(last_logits, **options)
        self._step: _Step | None = None

    def start(self, cache: KVCache) -> Callable[[Tensor], Tensor]:
        """Return a function from the next ids (B, 1) to logits (B, V), with a copy of ``cache`` as its start."""
        capacity = max(LEAST, 1 << (cache.capacity - 1).bit_length())
        if of_config(self.model, "position") == "learned":
            capacity = min(capacity, of_config(self.model, "max_len"))
        if self._step is None or self._step.size != (cache.layers[0].num_rows, capacity):
            self._step = None  # free its cache first
            self._step = _Step(self.model, self._run, cache, capacity)
        self._step.cache.fill(cache)
        return self._step


class _Step:
    """A decoding step for one batch size and capacity: ids (B, 1) to logits (B, V)."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor], cache: KVCache, capacity: int) -> None:
        self.model, self.run, self.size = model, run, (cache.layers[0].num_rows, capacity)
        self.cache = StaticCache(capacity, num_cached_layers(model))
        self.graph: torch.cuda.CUDAGraph | None = None
        device = next(model.parameters()).device
        if device.type == "cuda":
            self.ids = torch.zeros(self.size[0], 1, dtype=torch.long, device=device)
            self._record(cache)

    def _record(self, cache: KVCache) -> None:
        """Record one call as a CUDA graph. It changes the cache, which ``start`` fills again."""
        warmup = torch.cuda.Stream()
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):  # compiling and choosing kernels must not be recorded
            for _ in range(3):
                self.cache.fill(cache)  # each call uses a slot of the cache, and only one may be free
                self.run(self.model, self.ids, cache=self.cache)
            self.cache.fill(cache)
        torch.cuda.current_stream().wait_stream(warmup)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run(self.model, self.ids, cache=self.cache)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.graph is None:
            return self.run(self.model, ids, cache=self.cache)
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits.clone()
