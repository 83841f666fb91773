"""Text generation with causal and encoder–decoder models.

``generate`` decodes greedily or by sampling, with the settings of a ``Sampler``. ``beam_search`` looks for the most probable
continuation.
"""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.generation.decoding import beam_search, generate
    from minitx.generation.sampler import Sampler

__all__ = ["Sampler", "beam_search", "generate"]

__getattr__, __dir__ = on_first_use(__name__)
