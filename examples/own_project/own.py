"""A project that uses the trainer of minitx with its own model, data, objective and callback.

The task is to decide whether a row of seven numbers from 0 to 10 is sorted. The YAML files in ``conf/`` refer to the names in this file.
"""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from minitx.data.task import Task


class Net(nn.Module):
    """An embedding, one hidden layer, and two logits. ``vocab_size`` and ``num_classes`` come from the data."""

    def __init__(self, width: int = 32, length: int = 7, vocab_size: int = 11, num_classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.hidden = nn.Linear(length * width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 2) for ids (B, L)."""
        return self.head(F.relu(self.hidden(self.embed(input_ids).flatten(1))))


class Rows(Dataset):
    """Rows of numbers and their labels. Every second row is sorted."""

    def __init__(self, count: int, seed: int, length: int = 7) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 11, (count, length), generator=draw)
        self.ids[::2] = self.ids[::2].sort(dim=1).values
        self.labels = (self.ids.diff(dim=1) >= 0).all(dim=1).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def load_task(train_size: int = 512, seed: int = 0) -> Task:
    """Return the data as a ``Task``. minitx then draws the batches, and a run can be resumed bit for bit. ``seed`` is the run's."""
    return Task(
        name="sorted rows",
        train=Rows(train_size, seed=2 * seed),
        val=Rows(128, seed=1),
        model_fields={"vocab_size": 11, "num_labels": 2},
    )


class Module(L.LightningDataModule):
    """The same data as a ``LightningDataModule``, as an existing project may have it."""

    def __init__(self, batch_size: int = 32, train_size: int = 512) -> None:
        super().__init__()
        self.batch_size, self.train_size = batch_size, train_size

    def train_dataloader(self) -> DataLoader:
        """Return shuffled training rows."""
        return DataLoader(Rows(self.train_size, seed=0), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation rows."""
        return DataLoader(Rows(128, seed=1), batch_size=self.batch_size)


class Focal(nn.Module):
    """The focal loss of Lin et al. 2017 (arXiv:1708.02002, §3), summed over the rows, and the number of correct predictions."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sum of −(1 − p)^γ ln p, where p is the probability of the label."""
        nll = F.cross_entropy(logits, batch["labels"], reduction="none")
        right = logits.argmax(-1) == batch["labels"]
        return {"loss": ((1 - (-nll).exp()) ** self.gamma * nll).sum(), "correct": right.sum()}


class Announce(L.Callback):
    """Print the step when training starts."""

    def __init__(self, word: str = "go") -> None:
        self.word = word

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lightning calls this method once."""
        print(f"{self.word}: step {trainer.global_step}")
