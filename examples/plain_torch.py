"""Use ``MultiHeadAttention`` in a plain torch model with a plain training loop, without Lightning and without a config.

The task is recall: in ``g3b8x1b``, the last letter asks for the digit that followed it earlier, so the answer is ``8``. A random digit is
correct in one of ten cases, and a random digit of the row a little more often. To do better, a model must look back.

    python examples/plain_torch.py

This prints the accuracy on rows that were not used in training, for a model with attention and for one without.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.nn import MultiHeadAttention

LETTERS, DIGITS, PAIRS = "abcdefghijklmnopqrstuvwxyz", "0123456789", 6
IDS = {character: i for i, character in enumerate(LETTERS + DIGITS)}


def make_rows(count: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return ``count`` questions (count, 13), their answers (count,), and the accuracy of guessing a digit of the row."""
    draw, texts, answers, guess = random.Random(seed), [], [], 0.0
    for _ in range(count):
        letters, digits = draw.sample(LETTERS, PAIRS), draw.choices(DIGITS, k=PAIRS)
        asked = draw.randrange(PAIRS)
        texts.append("".join(letter + digit for letter, digit in zip(letters, digits, strict=True)) + letters[asked])
        answers.append(int(digits[asked]))
        guess += digits.count(digits[asked]) / PAIRS / count
    return torch.tensor([[IDS[character] for character in text] for text in texts]), torch.tensor(answers), guess


class RecallModel(nn.Module):
    """Character embeddings, a convolution over pairs of characters, gated attention, and a readout of the last position."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(IDS), width)
        self.pairs = nn.Conv1d(width, width, kernel_size=2, padding=1)
        self.norm = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, num_heads=4)  # (B, L, E) to (B, L, E)
        self.gate = nn.Parameter(torch.ones(width))
        self.readout = nn.Linear(width, len(DIGITS))

    def forward(self, ids: Tensor, *, use_attention: bool = True) -> Tensor:
        # each position of the convolution covers a character and the one before it
        x = self.pairs(self.characters(ids).transpose(1, 2))[..., :-1].transpose(1, 2).relu()
        if use_attention:
            x = x + self.gate * self.attention(self.norm(x), is_causal=True)
        return self.readout(x[:, -1])


def train(model: nn.Module, rows: Tensor, answers: Tensor, *, steps: int, use_attention: bool, seed: int) -> None:
    """Train ``model`` on random batches of 64 rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(rows), (64,), generator=draw)
        loss = F.cross_entropy(model(rows[batch], use_attention=use_attention), answers[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, rows: Tensor, answers: Tensor, *, use_attention: bool) -> float:
    """Return the share of correct answers."""
    return (model(rows, use_attention=use_attention).argmax(-1) == answers).float().mean().item()


def main(steps: int = 200) -> dict[str, float]:
    """Print and return the accuracies."""
    rows, answers, _ = make_rows(10_000, seed=0)
    unseen, right, guess = make_rows(2_000, seed=1)
    accuracies = {"a guess among ten digits": 0.1, "a guess among the digits of the row": guess}
    for name, use_attention in (("without attention", False), ("with attention", True)):
        torch.manual_seed(0)
        model = RecallModel()
        train(model, rows, answers, steps=steps, use_attention=use_attention, seed=0)
        accuracies[name] = accuracy(model, unseen, right, use_attention=use_attention)
    for name, value in accuracies.items():
        print(f"{name:36}{value:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
