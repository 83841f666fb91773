"""What a model writes: greedy, by sampling or by beam search, over any causal or encoder–decoder model.

``generate`` and ``beam_search`` write, ``Sampler`` says how ``generate`` chooses an id, and ``CompiledDecoder`` makes tokens cheaper.
"""

from minitx.generation.beams import beam_search
from minitx.generation.compiled import CompiledDecoder
from minitx.generation.decode import generate
from minitx.generation.sampler import Sampler

__all__ = ["CompiledDecoder", "Sampler", "beam_search", "generate"]
