"""Checks of models, ours and others. They import torch alone: models are given to them as objects."""
