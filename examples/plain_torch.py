"""Our attention in a plain torch model of somebody else's, trained by a plain loop; no Lightning, no config.

The task is recall, in text made on the spot: ``g3b8x1b`` asks which digit followed ``b``; the answer is ``8``. Chance is one in ten;
who guesses among the digits of the row is right a little more often; only looking back solves it.

    python examples/plain_torch.py

prints the accuracy on rows that training never saw, once with the attention and once with its output switched off.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.nn import MultiHeadAttention

LETTERS, DIGITS, PAIRS = "abcdefghijklmnopqrstuvwxyz", "0123456789", 6
IDS = {character: i for i, character in enumerate(LETTERS + DIGITS)}


def make_rows(count: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """``count`` questions (count, 13), their answers (count,), and how often a guess among the digits of a row is right."""
    draw, texts, answers, guess = random.Random(seed), [], [], 0.0
    for _ in range(count):
        letters, digits = draw.sample(LETTERS, PAIRS), draw.choices(DIGITS, k=PAIRS)
        asked = draw.randrange(PAIRS)
        texts.append("".join(letter + digit for letter, digit in zip(letters, digits, strict=True)) + letters[asked])
        answers.append(int(digits[asked]))
        guess += digits.count(digits[asked]) / PAIRS / count
    return torch.tensor([[IDS[character] for character in text] for text in texts]), torch.tensor(answers), guess


class TheirReader(nn.Module):
    """Somebody else's model: characters, a convolution over pairs of them, attention with a gate, a readout of the last position."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(IDS), width)
        self.pairs = nn.Conv1d(width, width, kernel_size=2, padding=1)
        self.norm = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, num_heads=4)  # ours: (B, L, E) in, (B, L, E) out
        self.gate = nn.Parameter(torch.ones(width))
        self.readout = nn.Linear(width, len(DIGITS))

    def forward(self, ids: Tensor, *, use_attention: bool = True) -> Tensor:
        x = (
            self.pairs(self.characters(ids).transpose(1, 2))[..., :-1].transpose(1, 2).relu()
        )  # a position and the one before it
        if use_attention:
            x = x + self.gate * self.attention(self.norm(x), is_causal=True)
        return self.readout(x[:, -1])


def train(model: nn.Module, rows: Tensor, answers: Tensor, *, steps: int, use_attention: bool, seed: int) -> None:
    """The whole trainer."""
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
    """The share of right answers."""
    return (model(rows, use_attention=use_attention).argmax(-1) == answers).float().mean().item()


def main(steps: int = 200) -> dict[str, float]:
    """Print and return what was measured."""
    rows, answers, _ = make_rows(10_000, seed=0)
    unseen, right, guess = make_rows(2_000, seed=1)
    found = {"a guess among ten digits": 0.1, "a guess among the digits of the row": guess}
    for name, use_attention in (("without attention", False), ("with attention", True)):
        torch.manual_seed(0)
        model = TheirReader()
        train(model, rows, answers, steps=steps, use_attention=use_attention, seed=0)
        found[name] = accuracy(model, unseen, right, use_attention=use_attention)
    for name, value in found.items():
        print(f"{name:36}{value:.3f}")
    return found


if __name__ == "__main__":
    main()
