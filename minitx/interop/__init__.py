"""Load and save weights: Hugging Face folders and folders of minitx. Pickle files and code are never read."""

from minitx.interop.pretrained import from_pretrained, save_pretrained
from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = ["FAMILIES", "from_pretrained", "load_hf", "save_hf", "save_pretrained"]
