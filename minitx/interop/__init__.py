"""Weights in and out of other people's formats: Hugging Face folders, our own, ONNX. No network, no pickle."""

from minitx.interop.export import export_onnx
from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = ["FAMILIES", "export_onnx", "load_hf", "save_hf"]
