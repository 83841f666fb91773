"""P7: training an encoder on rows of unequal length, 40 % of the padded batch being text: real tokens a second.

Three encoders of one shape (post-norm, GELU, learned positions, an untied head over the vocabulary, no dropout): ours,
``nn.TransformerEncoder`` with ``src_key_padding_mask`` and transformers' ``BertModel`` (sdpa) with ``attention_mask``. All train
on the same rows, an epoch of ``--batches`` batches with forward, backward and AdamW, on the head's loss at every real token. The
others get the rows padded in the order in which they come, as both libraries' loaders do unless told otherwise; ours gets them
packed (several rows in one, documents masked), or sorted into batches of similar length (``data.bucket``), or
padded alike. The same tokens are trained on everywhere, so the ratio of seconds is that of real tokens a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure import compare, judged, write
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.data.documents import pack
from minitx.data.sources import TrainSource
from minitx.data.task import Draw, Split, padded
from minitx.nn.models import build_model

TARGET, FILL = ">= 1.8", 0.4
Batch = dict[str, Tensor]


class Rows(Split):
    """Rows of random ids of given lengths; every token is its own label, which costs what any other label does."""

    def __init__(self, lengths: np.ndarray, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self.rows, self.lengths = [rng.integers(1, vocab_size, n) for n in lengths], lengths

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, items: np.ndarray) -> int:
        return int(self.lengths[items].sum())

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        ids = torch.from_numpy(padded([self.rows[i] for i in items], 0))
        key_mask = torch.arange(ids.shape[1]) < torch.from_numpy(self.lengths[items])[:, None]
        return {"input_ids": ids, "key_mask": key_mask, "labels": ids.masked_fill(~key_mask, -100)}


class TorchEncoder(nn.Module):
    """``nn.TransformerEncoder`` with embeddings and head as in ours."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        E, V = config.embed_dim, config.vocab_size
        assert V is not None
        layer = nn.TransformerEncoderLayer(E, config.num_heads, config.ffn_width, 0.0, activation="gelu", batch_first=True)
        self.token, self.position, self.norm = nn.Embedding(V, E), nn.Embedding(config.max_len, E), nn.LayerNorm(E)
        self.body, self.head = nn.TransformerEncoder(layer, config.num_layers), nn.Linear(E, V, bias=False)

    def forward(self, input_ids: Tensor, key_mask: Tensor) -> Tensor:
        x = self.norm(self.token(input_ids) + self.position.weight[: input_ids.shape[1]])
        return self.head(self.body(x, src_key_padding_mask=~key_mask))


class HFEncoder(nn.Module):
    """transformers' BERT with a head as in ours."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": config.embed_dim, "num_hidden_layers": config.num_layers, "intermediate_size": config.ffn_width}
        sizes |= {"num_attention_heads": config.num_heads, "max_position_embeddings": config.max_len, "type_vocab_size": 1}
        plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}
        self.body = BertModel(BertConfig(vocab_size=config.vocab_size, **sizes, **plain), add_pooling_layer=False)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, key_mask: Tensor) -> Tensor:
        return self.head(self.body(input_ids=input_ids, attention_mask=key_mask).last_hidden_state)


def row_lengths(num_rows: int, longest: int) -> np.ndarray:
    """Lengths of 1 to ``longest`` tokens, 40 % of it on average."""
    shares = np.random.default_rng(1).beta(0.8, 1.2, num_rows)
    return np.clip(np.ceil(shares * longest), 1, longest).astype(np.int64)


def epoch(source: TrainSource, batches: int) -> list[Batch]:
    """The batches of the first epoch, without the count that a network does not take."""
    made = [source.batch(step, range(source.batch_size)) for step in range(batches)]
    return [{name: tensor for name, tensor in batch.items() if name != "num_targets"} for batch in made]


def packed_batch(batch: Batch) -> Batch:
    """The rows of a padded batch, several in one; ``document_ids`` number them, -1 is padding."""
    lengths = batch["key_mask"].sum(1)
    found: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "document_ids": []}
    for rows in pack(lengths.numpy(), batch["key_mask"].shape[1]):
        for name in ("input_ids", "labels"):
            found[name].append(torch.cat([batch[name][row, : lengths[row]] for row in rows]))
        found["document_ids"].append(torch.arange(len(rows)).repeat_interleave(lengths[rows]))
    fills = {"input_ids": 0, "labels": -100, "document_ids": -1}
    packed = {name: nn.utils.rnn.pad_sequence(rows, True, fills[name]) for name, rows in found.items()}
    return {**packed, "key_mask": packed["document_ids"] >= 0}


def trainer_of(model: nn.Module, batches: list[Batch]) -> Callable[[], None]:
    """One epoch over ``batches`` a call."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train() -> None:
        for batch in batches:
            optimizer.zero_grad()
            logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            optimizer.step()

    return train


def sides(config: TransformerConfig, batch_size: int, batches: int) -> Iterator[tuple[str, Callable[[], None], dict[str, Any]]]:
    """(name, an epoch of training, what there is to know) of every side."""
    rows = Rows(row_lengths(batch_size * batches, config.max_len), config.vocab_size or 0)
    options = {"batch_size": batch_size, "seed": 0}
    padded = epoch(TrainSource(rows, bucket=False, **options), batches)  # type: ignore[arg-type]
    bucketed = epoch(TrainSource(rows, bucket=True, **options), batches)  # type: ignore[arg-type]
    packed = [packed_batch(batch) for batch in padded]
    for name, build, data in (
        ("nn.TransformerEncoder", TorchEncoder, padded),
        ("transformers BERT", HFEncoder, padded),
        ("minitx packed", build_model, packed),
        ("minitx bucketed", build_model, bucketed),
        ("minitx padded", build_model, padded),
    ):
        torch.manual_seed(0)
        model = build(config).train()
        cells = sum(batch["key_mask"].numel() for batch in data)
        known = {"fill": float(rows.lengths.sum() / cells), "parameters": sum(p.numel() for p in model.parameters())}
        yield name, trainer_of(model, data), {**known, "real_tokens": int(rows.lengths.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 128, "heads": 4, "layers": 4, "vocab": 2048, "length": 128, "batch-size": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batches", type=int, default=2, help="of an epoch, which is one piece of work")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    config = TransformerConfig(
        architecture="encoder", vocab_size=given.vocab, embed_dim=given.width, num_heads=given.heads, num_layers=given.layers,
        max_len=given.length, norm_position="post", embed_norm=True, tie_embeddings=False,
    )  # fmt: skip
    found = {name: (work, known) for name, work, known in sides(config, given.batch_size, given.batches)}
    about = {name: known for name, (_, known) in found.items()}
    rows = []
    print("| real tokens/s | ratio | 95 % | fill | other, tokens/s | ours, tokens/s |\n|---|---|---|---|---|---|")
    for ours, theirs, wanted in (
        ("minitx packed", "nn.TransformerEncoder", TARGET),
        ("minitx packed", "transformers BERT", TARGET),
        ("minitx bucketed", "nn.TransformerEncoder", None),
        ("minitx bucketed", "transformers BERT", None),
        ("minitx padded", "nn.TransformerEncoder", None),
        ("minitx padded", "transformers BERT", None),
    ):
        result = compare(found[theirs][0], found[ours][0], pairs=given.pairs)
        tokens = about[ours]["real_tokens"]
        speeds = {"a_tokens_per_s": tokens / result["a_seconds"], "b_tokens_per_s": tokens / result["b_seconds"]}
        control = {name: result[name] for name in ("control", "control_holds", "pairs")}
        rows.append(judged(f"{ours} / {theirs}", result["ratio"], wanted, fill=about[ours]["fill"], **speeds, **control))
        interval = f"{result['ratio']['low']:.2f} to {result['ratio']['high']:.2f}"
        print(
            f"| {rows[-1]['name']} | {result['ratio']['median']:.2f} | {interval} | {about[ours]['fill']:.2f} | "
            f"{speeds['a_tokens_per_s']:,.0f} | {speeds['b_tokens_per_s']:,.0f} |"
        )
    title = f"Ragged encoder training, {100 * about['minitx padded']['fill']:.0f} % fill: real tokens/s, minitx over others"
    results = {"target": "P7", "title": title, "rows": rows, "threads": torch.get_num_threads(), **vars(given), "sides": about}
    print(write("ragged_cpu", {**results, "transformers": version("transformers")}))


if __name__ == "__main__":
    main()
