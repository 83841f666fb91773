"""A task of one's own with its own data, trained and judged by minitx, from a file outside of the package.

The task: is a word of six letters a palindrome? In the other half of the words two letters have changed places, so that neither the
letters of a word nor any one place says anything: a guess is right about half of the time.

A data set is a ``Task``: two lists of rows (or two data sets of torch), and what a model must be. ``LOADERS`` finds the function
that makes it by the type of its config. Trainer, checkpoints, evaluation with intervals and baselines are then minitx's.

    python examples/new_task.py

prints the accuracy on words that training never saw, with its 95 % interval, beside that of a guess.
"""

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minitx.config import EvaluationConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainerConfig, TransformerConfig
from minitx.data.baselines import majority_accuracy
from minitx.data.load import LOADERS
from minitx.data.task import Task
from minitx.training.run import train

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class PalindromeConfig:
    """What the task is made of. ``batch_size``, ``num_workers`` and ``max_tokens`` are asked of every data config."""

    name: str = "palindromes"
    length: int = 6
    train_size: int = 8_000
    val_size: int = 1_000
    batch_size: int = 64
    num_workers: int = 0

    @property
    def max_tokens(self) -> int:
        return self.length + 1


def make_words(config: PalindromeConfig, count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """``count`` words as ids of letters, and whether each is a palindrome."""
    draw, words, labels = random.Random(seed), [], []
    for _ in range(count):
        half = draw.sample(range(len(LETTERS)), config.length // 2)
        word, label = half + half[::-1], draw.randrange(2)
        if not label:
            i, j = draw.sample(range(config.length // 2), 2)
            word[i], word[j] = word[j], word[i]
        words.append(word)
        labels.append(label)
    return words, labels


def load_palindromes(config: PalindromeConfig, folder: Path, tokenizer: object) -> Task:
    """The task: rows with a first position that gathers the answer, what the model must be, baselines."""
    words, labels = make_words(config, config.train_size, seed=0)
    known = set(map(tuple, words))
    val_words, val_labels = make_words(config, config.val_size, seed=1)
    new = [i for i, word in enumerate(val_words) if tuple(word) not in known]
    first = [len(LETTERS)]
    return Task(
        name="data=palindromes",
        kind="classify",
        train=[{"input_ids": first + word, "labels": label} for word, label in zip(words, labels, strict=True)],
        val=[{"input_ids": first + val_words[i], "labels": val_labels[i]} for i in new],
        key_masks={},  # all words are of one length
        model_fields={"vocab_size": len(LETTERS) + 1, "num_labels": 2},
        label_names=("no", "palindrome"),
        baselines=lambda: {"majority_accuracy": majority_accuracy(np.array(labels), np.array([val_labels[i] for i in new]))},
    )


LOADERS[PalindromeConfig] = load_palindromes


def main(steps: int = 200) -> dict[str, float]:
    """Print and return what was measured."""
    sizes = {"embed_dim": 64, "num_heads": 4, "num_layers": 2, "ffn_dim": 128, "max_len": 16}
    config = RunConfig(
        model=TransformerConfig(architecture="encoder", head="sequence", init="lecun", **sizes),
        data=PalindromeConfig(),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(warmup_steps=30),
        trainer=TrainerConfig(max_steps=steps, accelerator="cpu", threads=1, ckpt_every=0),
        evaluation=EvaluationConfig(at_end=True),
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder, "run"))
        report = json.loads(Path(folder, "run", "evaluation.json").read_text(encoding="utf-8"))
    found = report["metrics"]["accuracy"]
    guess = report["baselines"]["majority_accuracy"]
    print(f"accuracy on {found['count']} new words: {found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
    print(f"always the more frequent answer: {guess:.3f}")
    return {**found, "guess": guess}


if __name__ == "__main__":
    main()
