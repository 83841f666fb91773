"""Small models, and what ``capture`` records of one call of them."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitx.analysis import capture
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, EncoderDecoder

CHANGEABLE = ("scores", "weights", "values", "heads", "feedforward", "residual")
SIZES = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "init": "lecun"}
IDS = torch.tensor([[1, 2, 3, 5, 7], [4, 4, 8, 9, 1]])


def model_of(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return DecoderLM(TransformerConfig(**{**SIZES, "max_len": 8, **options})).eval().to(dtype)


def translation_of(**options):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_decoder_layers": 3, **options}
    return EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **sizes)).eval()


class Checkpointed(nn.Module):
    """A block under torch's own checkpoint."""

    def __init__(self, block, use_reentrant=False):
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x, **options):
        return checkpoint(partial(self.block, **options), x, use_reentrant=self.use_reentrant)


@torch.no_grad()
def records_of(model, *args, what="statistics", layers=None, heads=None, **inputs):
    """The records of one call."""
    with capture(model, what=what, layers=layers, heads=heads) as seen:
        model(*args, **inputs)
    return seen
