"""Weights in and out: Hugging Face folders, folders of our own, ONNX. No pickle, no code from a folder."""

from minitx.interop.export import export_onnx
from minitx.interop.pretrained import from_pretrained, save_pretrained
from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = ["FAMILIES", "export_onnx", "from_pretrained", "load_hf", "save_hf", "save_pretrained"]
