"""Weights in and out of other people's formats: Hugging Face folders, our own, ONNX. No network, no pickle."""

from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = ["FAMILIES", "load_hf", "save_hf"]
