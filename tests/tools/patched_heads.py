"""Which heads of a two-layer model carry the answer to the induction task: the numbers in docs/dev/looking_records.md.

    python tests/tools/patched_heads.py

The model is trained with seed 1. Each head's ``values`` in a corrupted batch are then replaced with the clean ones.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from minitx.analysis import HeadEffects, patch_heads
from minitx.config import RunConfig, TrainerConfig, TransformerConfig, node
from minitx.data import induction
from minitx.data.recall import induction_targets
from minitx.nn import DecoderLM
from minitx.training.optimizers import adamw
from minitx.training.run import train
from minitx.training.schedules import constant

SIZES = {"embed_dim": 128, "num_heads": 2, "num_layers": 2, "ffn_dim": 128, "max_len": 64}
OPTIONS = {"activation": "relu", "position": "rotary", "init": "lecun", "tie_embeddings": False}


def effects(steps: int = 400) -> HeadEffects:
    """Train the model for some steps, and patch each of its heads on 128 rows."""
    task = induction()
    torch.manual_seed(1)
    model = DecoderLM(TransformerConfig(**task.model_fields, **SIZES, **OPTIONS))
    config = RunConfig(
        optimizer=node(adamw, lr=3e-3),
        schedule=node(constant, warmup_steps=steps // 10),
        trainer=TrainerConfig(max_steps=steps, clip=1.0, accelerator="cpu"),
    )
    with TemporaryDirectory() as folder:
        train(config, f"{folder}/run", model=model, data=task, batch_size=64)
    clean = task.train(128, np.random.default_rng(3))["input_ids"]
    where = induction_targets(clean)[:, -1]  # the position with the answer to the last token
    row = torch.arange(len(clean))
    corrupted = clean.clone()
    corrupted[row, where] = torch.tensor([next(t for t in range(64) if t not in ids) for ids in clean.tolist()])

    def preference(logits: Tensor) -> Tensor:
        """The logit of the clean answer minus the logit of the corrupted answer, at the last position."""
        return logits[row, -1, clean[row, where]] - logits[row, -1, corrupted[row, where]]

    return patch_heads(model, {"input_ids": clean}, {"input_ids": corrupted}, preference, what="values")


if __name__ == "__main__":
    print(effects().mean)  # (layers, heads)
