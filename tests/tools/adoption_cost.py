"""What adoption's check costs: python tests/tools/adoption_cost.py

Prints milliseconds of one core (process time, medians of 9), without and with the check, for small models and for random weights of the
shapes of GPT-2 and SmolLM2, and the same for one forward pass of the four rows of the check.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from minitx.interop import adopt_hf, release_hf
from minitx.interop.trial import AdoptionTrial, made_up_inputs
from tests.interop.families import build

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}


def adopted(model: nn.Module, check: str | bool) -> None:
    release_hf(adopt_hf(model, check=check))


def milliseconds(run: Callable[..., object], *args: object, **options: object) -> float:
    times = []
    for _ in range(10):
        start = time.process_time()
        run(*args, **options)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    models = {name: build(name) for name in ("GPT2", "Llama", "Bert", "ViT", "T5")}
    models["GPT-2, 124M"] = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    models["SmolLM2, 135M"] = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2)).eval()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name, model in models.items():
        rows = AdoptionTrial(model, made_up_inputs(model)).inputs
        with torch.no_grad():
            forward = milliseconds(model, **rows)
        without, with_check = (milliseconds(adopted, model, check) for check in (False, "auto"))
        print(f"{name:14} without {without:7.1f} ms, with {with_check:7.1f} ms; a forward pass {forward:7.1f} ms")
