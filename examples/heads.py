"""Measure where each head of a trained model attends: near, far, at one position, or along the syntax of a treebank.

    python examples/heads.py runs/char_lm/.../checkpoints/last.ckpt                  # 64 validation rows of the run
    python examples/heads.py runs/char_lm/.../checkpoints/last.ckpt trees.conllu     # sentences; needs pip install conllu

Both print a line for each head and write heads.png. The second needs a decoder or encoder with a tokenizer.
"""

import sys

import torch

from minitx.analysis import Snapshot, head_scores, heads_figure, read_conllu, save_figure, syntax_scores, take_snapshot
from minitx.data.datamodule import DataModule
from minitx.training.checkpoints import load_stored


def main(checkpoint: str, treebank: str | None = None, num_rows: int = 64, path: str = "heads.png"):
    """Print the lines, draw the figure, and return the scores."""
    stored = load_stored(checkpoint)
    model, tokenizer = stored.network, stored.tokenizer

    def attend(input_ids: torch.Tensor) -> Snapshot:
        return take_snapshot(model, {"input_ids": input_ids})

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    syntax = None
    if treebank is None:
        rows = DataModule(stored.task(), batch_size=num_rows).probe_batch(num_rows)
        batch = stored.net.inputs(rows)  # only the keys that the model reads
        count = len(next(iter(batch.values())))
        snapshots = (take_snapshot(model, {name: tensor[i : i + 1] for name, tensor in batch.items()}) for i in range(count))
    else:
        parsed, max_len = read_conllu(treebank), model.config.max_len
        sentences = [sentence for sentence in parsed if sentence.encode(encode)[0].shape[1] <= max_len][:num_rows]
        syntax = syntax_scores(attend, sentences, encode)
        snapshots = (attend(sentence.encode(encode)[0]) for sentence in sentences)
    heads = head_scores(snapshots, syntax=syntax)
    print(*heads.lines(), sep="\n")
    save_figure(heads_figure(heads), path)
    return heads


if __name__ == "__main__":
    main(*sys.argv[1:])
