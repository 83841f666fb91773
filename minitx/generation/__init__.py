"""Text generation with causal and encoder–decoder models.

``generate`` decodes greedily or by sampling, with the settings of a ``Sampler``. ``beam_search`` returns the most probable of many
continuations. ``CompiledDecoder`` makes ``generate`` faster.
"""

from minitx.generation.beams import beam_search
from minitx.generation.compiled import CompiledDecoder
from minitx.generation.decode import generate
from minitx.generation.sampler import Sampler

__all__ = ["CompiledDecoder", "Sampler", "beam_search", "generate"]
