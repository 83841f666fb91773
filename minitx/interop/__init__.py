"""Load and save weights: Hugging Face folders, folders of minitx, and ONNX files. Pickle files and code are never read."""

from minitx.interop.export import export_onnx
from minitx.interop.pretrained import from_pretrained, save_pretrained
from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = ["FAMILIES", "export_onnx", "from_pretrained", "load_hf", "save_hf", "save_pretrained"]
