"""A GPT in one file: blocks and attention from minitx, and a training run by minitx's trainer.

Read it from top to bottom. ``GPT`` is a plain ``nn.Module``. A block computes

    x = x + attention(norm(x))        every position looks at itself and at the positions before it
    x = x + feedforward(norm(x))      every position is changed by itself

and the attention of one head is softmax(q·kᵀ / √d_k) v. The model sees characters and answers with a score (a logit) for each possible
next character. It learns from the King James Bible, a public text of four million characters.

    python examples/gpt.py              # about a minute on two cores; writes to runs/gpt

prints the loss on text that training never saw, and a passage that the model writes. The same model from the command line, with every
option of the trainer:

    train.py ~model +model._target_=gpt.GPT data=kjv trainer.max_steps=300
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import OptimizerConfig, RunConfig, ScheduleConfig, TextDataConfig, TrainerConfig
from minitx.data.load import load_task
from minitx.nn import Block, FeedForward, MultiHeadAttention, init_weights
from minitx.training.run import train


class GPT(nn.Module):
    """A decoder-only Transformer, after Radford et al. 2019 (GPT-2).

    Args:
        vocab_size: V, how many different tokens there are. The trainer takes it from the data.
        embed_dim: E, the width of a token. num_heads: how many heads share it.
        num_layers: how many blocks. max_len: the longest text. dropout: in training only.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int = 96,
        num_heads: int = 4,
        num_layers: int = 4,
        max_len: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.max_len = max_len
        self.token = nn.Embedding(vocab_size, embed_dim)  # what stands at a position
        self.position = nn.Embedding(max_len, embed_dim)  # which position it is
        self.blocks = nn.ModuleList(
            Block(
                MultiHeadAttention(embed_dim, num_heads, dropout=dropout),
                FeedForward(embed_dim, 4 * embed_dim, dropout=dropout),
                norm=lambda: nn.LayerNorm(embed_dim),
                causal=True,  # no position sees the future
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.head.weight = self.token.weight  # one table for reading and for writing
        init_weights(self, "gpt2", num_layers=num_layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids (B, L) to logits (B, L, V): at each position, the scores of the next token."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token(input_ids) + self.position(positions)  # (B, L, E)
        for block in self.blocks:
            x = block(x)  # (B, L, E)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, input_ids: Tensor, num_tokens: int, temperature: float = 0.8) -> Tensor:
        """Continue ids (B, L) by ``num_tokens`` draws from softmax(logits / temperature)."""
        for _ in range(num_tokens):
            logits = self(input_ids[:, -self.max_len :])[:, -1]  # (B, V), after the last token
            probabilities = F.softmax(logits / temperature, dim=-1)
            input_ids = torch.cat((input_ids, torch.multinomial(probabilities, 1)), dim=1)
        return input_ids


def main(steps: int = 300, folder: str | Path = "runs/gpt") -> tuple[float, str]:
    """Train, and return the validation loss (nats a character) and a passage that the model writes."""
    data = TextDataConfig(name="kjv", context_len=64, batch_size=32)
    task = load_task(data)
    assert task.tokenizer is not None
    torch.manual_seed(0)
    model = GPT(task.tokenizer.vocab_size)
    config = RunConfig(
        data=data,
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.1),
        schedule=ScheduleConfig(warmup_steps=min(50, steps)),
        trainer=TrainerConfig(max_steps=steps, val_every=0, val_batches=20, clip=1.0),
    )
    result = train(config, Path(folder), model=model, data=task, batch_size=data.batch_size)
    start = torch.tensor([task.tokenizer.encode("And God said ").tolist()])
    text = task.tokenizer.decode(model.eval().cpu().write(start, 200)[0].tolist())
    print(f"validation loss after {steps} steps: {result['val_loss']:.3f} nats a character\n\n{text}")
    return result["val_loss"], text


if __name__ == "__main__":
    main()
