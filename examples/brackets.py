"""Train a small model to match brackets, and find out which heads follow the structure and which only follow positions.

The language has four kinds of opening brackets, and one closing bracket for all kinds:

    ( [ . { < . . .        at each "." the model must predict which kind is closed: [ < { (

The answer is the last bracket that is still open. Its distance differs from one "." to the next. A Transformer can find it by
counting how deep each position is nested, and attending to the nearest bracket of that depth (Yao et al. 2021,
arXiv:2105.11115).

    python examples/brackets.py        # a few minutes on one core; writes to runs/brackets
"""

from pathlib import Path

import numpy as np
import torch
from syntax_heads import Sentence, syntax_scores

from minitx.analysis import Snapshot, head_scores, heads_figure, save_figure, take_snapshot
from minitx.config import RunConfig, TrainerConfig, node
from minitx.data.task import Task
from minitx.nn import build_model
from minitx.training.checkpoints import load_model
from minitx.training.optimizers import adamw
from minitx.training.run import train
from minitx.training.schedules import cosine

SYMBOLS = ".([{<"
CLOSE, KINDS = 0, 4
LENGTH, DEEPEST = 40, 8


def draw(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (count, LENGTH), and for each closing bracket the position of its opening bracket (−1 elsewhere)."""
    ids, match = np.full((count, LENGTH), CLOSE), np.full((count, LENGTH), -1)
    for row in range(count):
        still_open: list[int] = []
        opens = True
        for i in range(LENGTH):
            opens = opens ^ (random.random() < 0.3)  # runs of opening and of closing brackets
            opens = not still_open or (opens and len(still_open) < DEEPEST)
            if opens:
                ids[row, i] = 1 + random.integers(KINDS)
                still_open.append(i)
            else:
                match[row, i] = still_open.pop()
    return ids, match


def batch(count: int, random: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return ``input_ids`` and ``labels``. The label of a closing bracket is the kind of its opening bracket; other labels are −100."""
    ids, match = draw(count, random)
    labels = np.where(match < 0, -100, np.take_along_axis(ids, match.clip(0), axis=1))
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def load_task() -> Task:
    """Return a task with new rows at each training step and 200 fixed validation rows."""
    val = batch(200, np.random.default_rng(1))
    rows = [{name: tensor[i] for name, tensor in val.items()} for i in range(200)]
    return Task(
        name="brackets", kind="language_model", train=batch, val=rows, key_masks={}, model_fields={"vocab_size": len(SYMBOLS)}
    )


def sentences(count: int, seed: int) -> list[Sentence]:
    """Return rows with arcs from each closing bracket to its opening bracket (``match``) and to the position after that (``after``)."""
    out = []
    for ids, match in zip(*draw(count, np.random.default_rng(seed)), strict=True):
        pairs = [(i, j) for i, j in enumerate(match.tolist()) if j >= 0]
        arcs = [(i, j, "match") for i, j in pairs] + [(i, j + 1, "after") for i, j in pairs if j + 1 < i]
        out.append(Sentence(tuple(SYMBOLS[i] for i in ids), tuple(arcs)))
    return out


def main(steps: int = 1200, seed: int = 0, folder: str | Path = "runs/brackets") -> dict[str, float]:
    """Train, then measure the heads on 100 new rows. Return the accuracy, and the best head's agreement with its controls."""
    config = RunConfig(
        model=node(build_model, embed_dim=64, num_heads=4, num_layers=3, max_len=64),
        optimizer=node(adamw, lr=3e-3),
        schedule=node(cosine, warmup_steps=min(50, steps)),
        trainer=TrainerConfig(max_steps=steps, val_every=0, threads=1, accelerator="cpu"),
        seed=seed,
    )
    accuracy = train(config, Path(folder), data=load_task(), batch_size=64)["val_accuracy"]
    model, _, _ = load_model(Path(folder) / "checkpoints" / "last.ckpt")

    def attend(ids: torch.Tensor) -> Snapshot:
        return take_snapshot(model, {"input_ids": ids})

    def encode(text: str) -> list[int]:
        return [SYMBOLS.index(symbol) for symbol in text]

    rows = sentences(100, seed=2)
    syntax = syntax_scores(attend, rows, encode)
    heads = head_scores(attend(row.encode(encode)[0]) for row in rows)
    save_figure(heads_figure(heads), Path(folder) / "heads.png")
    print(f"accuracy on 200 new rows: {accuracy:.3f}", *heads.lines(), sep="\n")
    (layer, head), best = max(syntax.items(), key=lambda item: item[1].gain.mean)
    controls = f"fixed position {best.position:.2f}, words shuffled {best.shuffled:.2f}"
    print(f"{layer}, head {head}: {best.at} in {best.value:.2f} ({controls}; gain {best.gain.low:.2f} to {best.gain.high:.2f})")
    return {"accuracy": accuracy, "agreement": best.value, "position": best.position, "shuffled": best.shuffled}


if __name__ == "__main__":
    main()
