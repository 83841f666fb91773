"""Yang et al. 2022 (μP): one Adam step moves attention's logits by width^½ with 1/√d_k, and by a constant with 1/d_k.

Claim (arXiv:2203.03466, §4 and Definition 4.1): where the rates of matrices fall as 1/width (Adam), an update changes each entry of queries and keys by an
amount that does not depend on width. The changes line up with the keys and queries that they meet, so q·k changes by a sum of d_k terms
of one sign, which grows as d_k and not as √d_k. Against the width, with d_k = width, the change of the logits has slope 1/2 with 1/√d_k and
0 with 1/d_k. By the same argument it is 1 without a scale, which the paper does not say.

Setting: ``DecoderLM`` with one layer and one head of d_k = width, on key-value recall with 64 rows. Embeddings have variance 1 and rate 0.001; all
matrices have the rate 0.001 · 64 / width; the initial head is μP's. The number is the RMS change of the last query's logits on the batch.

Limits: the claim is about large widths. It is shown for 4 keys, and for the 64 keys of the lab: there the updates for other tokens add a
part that fades as the width grows, and the slopes come out smaller. From the second step on, the other weights have moved too.

``python examples/published_logit_step.py`` takes minutes on one core.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from published import Record, markdown, run, slope, spread
from torch.nn.functional import cross_entropy

from minitx.analysis import capture
from minitx.config import ParameterRule, TransformerConfig
from minitx.data import kv_lookup
from minitx.data.seeding import generator
from minitx.nn import DecoderLM, init_weights
from minitx.training.optimizers import adamw

TASKS = {"4 keys": kv_lookup(num_keys=4, num_values=2, num_pairs=2), "64 keys": kv_lookup()}
PAPER = {"inv_sqrt": "1/2", "inv": "0", "unscaled": "1 (not said)"}
"""The slope in the paper, by scale."""


def logit_changes(task: str, scale: str, width: int, seed: int, steps: int = 4, rate: float = 1e-3) -> list[float]:
    """Return the RMS change of the last query's logits since the start, after 1, 2, … ``steps`` updates on one batch."""
    torch.manual_seed(seed)
    sizes = {"embed_dim": width, "num_heads": 1, "num_layers": 1, "ffn_dim": 64, "max_len": 32, "position": "none"}
    plain = {"bias": False, "tie_embeddings": False, "scale": scale, **TASKS[task].model_fields}
    model = DecoderLM(TransformerConfig(**sizes, **plain))
    init_weights(model, "lecun", gains={"head": width**-0.5})
    rules = (ParameterRule(match="proj|head", lr=64 / width),)
    optimizer, batch = adamw(model, lr=rate, rules=rules), TASKS[task].train(64, generator(seed, "train", 0))
    with capture(model, what="scores") as seen:
        for step in range(steps + 1):
            logits = model(batch["input_ids"], token_type_ids=batch["token_type_ids"])[:, -1]
            if step < steps:
                optimizer.zero_grad()
                cross_entropy(logits, batch["labels"][:, -1]).backward()
                optimizer.step()
    ((first, *later),) = seen.values()
    return [(scores - first)[:, :, -1].square().mean().sqrt().item() for scores in later]


def measure(widths: Sequence[int] = (64, 128, 256, 512, 1024), seeds: int = 6, tasks: Sequence[str] = tuple(TASKS)) -> Record:
    """Return the changes by task and scale, as lists over the seeds, ``widths`` and steps."""
    changes = {}
    for task in tasks:
        for scale in PAPER:
            runs = [[logit_changes(task, scale, width, seed) for width in widths] for seed in range(seeds)]
            changes[f"{task}, {scale}"] = [[[float(f"{x:.5g}") for x in steps] for steps in row] for row in runs]
    return {"widths": list(widths), "changes": changes}


def table(record: Record) -> str:
    """Return the table: the change after one step, medians over the seeds; and the slopes of the seeds after one and four steps."""
    widths, rows = record["widths"], list[list[str | float]]()
    for case, by_seed in record["changes"].items():
        changes = torch.tensor(by_seed)  # (seeds, widths, steps)
        slopes = [spread([slope(widths, row) for row in changes[:, :, step].tolist()]) for step in (0, -1)]
        task, scale = case.split(", ")
        rows.append([task, scale, *changes[:, :, 0].quantile(0.5, dim=0).tolist(), *slopes, PAPER[scale]])
    headings = ["task", "scale", *(f"width {width}" for width in widths), "slope, step 1", "slope, step 4", "paper"]
    return markdown(headings, rows)


QUICK = {"widths": (32, 64, 128), "seeds": 2, "tasks": ("4 keys",)}

if __name__ == "__main__":
    run("published_logit_step", measure, table, QUICK)
