"""From a model's forward to torch's kernel: few frames, and what a mask means computed once."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import minitx
from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, Padding
from minitx.nn.backends import sdpa

PACKAGE = str(Path(minitx.__file__).parent)
LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "qk_norm": "rms", "num_kv_heads": 1}


def small(layers, **options):
    sizes = {"vocab_size": 11, "embed_dim": 32, "num_heads": 2, "max_len": 64}
    model = DecoderLM(TransformerConfig(**sizes, num_layers=layers, **options)).eval()
    ids, real = torch.randint(11, (2, 7)), torch.arange(7)[None] >= torch.tensor([[2], [0]])
    return lambda: model(ids, key_mask=real)


def test_at_most_seven_frames_lie_between_a_models_forward_and_torchs_kernel(monkeypatch):
    depths, kernel = [], sdpa.F.scaled_dot_product_attention

    def counting(*args, **kwargs):
        frame, found = sys._getframe(1), []
        while frame is not None:
            found += [frame.f_code.co_qualname] * frame.f_code.co_filename.startswith(PACKAGE)
            frame = frame.f_back
        depths.append(found)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", counting)
    small(2, **LLAMA)()
    assert len(depths) == 2
    for found in depths:
        assert found[-1] == "DecoderLM.forward"
        assert len(found) <= 7, found


@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9)], ids=str)
def test_a_mask_is_lowered_once_a_forward_and_not_once_a_layer(monkeypatch, backend, windows):
    """Padding and Causal become one tensor for all layers with the same window."""
    lowered = Counter()

    def counting(owner, name):
        real = getattr(owner, name)

        def count(self, *args, **kwargs):
            lowered[owner] += 1
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counting(Padding, "dense")
    counting(Causal, "visible")
    monkeypatch.setattr(TransformerConfig, "window_of", lambda self, layer: windows[layer % len(windows)])
    forward = small(5, backend=backend)
    for forwards in (1, 2):
        forward()
        assert lowered == {Padding: len(windows) * forwards, Causal: len(windows) * forwards}
