"""One training step of the small character model without minitx's trainer: what ``cold_start.py`` compares ``scripts/train.py`` with.

    python benchmarks/bare.py torch TOKENS
    python benchmarks/bare.py lightning TOKENS

The same network, random windows of the same token file, the same AdamW. Prints ``step`` when the first update is made.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM

VOCABULARY, ROWS, CONTEXT = 128, 12, 64


def network() -> DecoderLM:
    return DecoderLM(TransformerConfig(vocab_size=VOCABULARY))


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of a token file; no more than a script would write."""

    def __init__(self, path: str) -> None:
        self.tokens = np.memmap(path, dtype="<u2", mode="r")

    def __len__(self) -> int:
        return len(self.tokens) - CONTEXT

    def __getitem__(self, start: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens[start : start + CONTEXT + 1].astype(np.int64))


def loader(path: str) -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(Windows(path), batch_size=ROWS, shuffle=True)


def bare_torch(path: str) -> None:
    model = network()
    optimizer = adamw(model)
    for rows in loader(path):
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", flush=True)
        return


def bare_lightning(path: str) -> None:
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            return loss_of(self.model, rows)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

        def on_train_batch_end(self, *_: object) -> None:
            print("step", flush=True)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_steps=1, accelerator="cpu", **quiet).fit(Module(), loader(path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=["torch", "lightning"])
    parser.add_argument("tokens")
    given = parser.parse_args()
    {"torch": bare_torch, "lightning": bare_lightning}[given.which](given.tokens)
