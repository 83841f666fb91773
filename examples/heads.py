"""Measure where each head of a trained model attends: near, far, or at one position, on 64 validation rows of the run.

    python examples/heads.py runs/char_lm/.../checkpoints/last.ckpt

It prints a line for each head and writes heads.png. ``syntax_heads.py`` compares heads with a treebank.
"""

import sys

from minitx.analysis import head_scores, heads_figure, save_figure, take_snapshot
from minitx.data.datamodule import DataModule
from minitx.training.checkpoints import load_stored


def main(checkpoint: str, num_rows: int = 64, path: str = "heads.png"):
    """Print the lines, draw the figure, and return the scores."""
    stored = load_stored(checkpoint)
    rows = DataModule(stored.task(), batch_size=num_rows).probe_batch(num_rows)
    batch = stored.net.inputs(rows)  # only the keys that the model reads
    count = len(next(iter(batch.values())))
    inputs = ({name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(count))
    heads = head_scores(take_snapshot(stored.network, each) for each in inputs)
    print(*heads.lines(), sep="\n")
    save_figure(heads_figure(heads), path)
    return heads


if __name__ == "__main__":
    main(*sys.argv[1:])
