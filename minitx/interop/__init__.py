"""Weights and models of others: Hugging Face folders read into our blocks and written back, and adopted Hugging Face models.

Pickle files and code are never read.
"""

from minitx.interop.adopt import adopt_hf, release_hf
from minitx.interop.finetune import Lora, hf_from_config, pretrained_hf
from minitx.interop.pretrained import from_pretrained, save_pretrained
from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = [
    "FAMILIES",
    "Lora",
    "adopt_hf",
    "from_pretrained",
    "hf_from_config",
    "load_hf",
    "pretrained_hf",
    "release_hf",
    "save_hf",
    "save_pretrained",
]
