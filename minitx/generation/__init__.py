"""What a model writes: greedy, by sampling or by beam search, over any causal or encoder–decoder model.

``generate`` is the way in; ``CompiledDecoder`` makes its tokens cheaper. The rest are what it is made of.
"""

from minitx.generation.compiled import CompiledDecoder
from minitx.generation.decode import generate
from minitx.generation.filters import (
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repeats,
    row_uniforms,
)
from minitx.generation.search import length_norm

__all__ = [
    "CompiledDecoder",
    "apply_temperature",
    "draw",
    "generate",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "length_norm",
    "penalise_repeats",
    "row_uniforms",
]
