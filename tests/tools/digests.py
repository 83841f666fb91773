"""Digests of what the package computes, to show that a redesign changed nothing.

    python tests/tools/digests.py --record    writes tests/tools/digests.json
    python tests/tools/digests.py             computes them again and names what differs; exit code 1 if anything does

A digest is the SHA-256 of tensors, bit for bit: logits and gradients of each model, batches of each task, losses and final weights
of three steps of each experiment. Bits depend on the processor and on torch, so a record is compared on the machine that made it.
A value (the sum of the absolute numbers) stands beside each digest, for parts that a redesign may compute in another order.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minitx.cli.compose import compose_config  # noqa: E402
from minitx.cli.launch import run_training  # noqa: E402
from minitx.data.batches import Address  # noqa: E402
from minitx.nn import scaled_dot_product_attention  # noqa: E402
from minitx.nn.models import build_model  # noqa: E402
from minitx.training.build import open_data, shape_of_node  # noqa: E402

RECORD = Path(__file__).with_suffix(".json")
CONFIGS = ROOT / "configs"
OF_GRIDS = ("_ablation",)  # experiments that are grids of runs
VALUES_ONLY = ("chunk_tokens", "streaming")  # parts that are replaced by a library's
CLASSES = "".join(f"{kind} text number {i}\t{kind}\n" for i in range(200) for kind in ("red", "green", "blue"))
PAIRS = "".join(f"a small sentence {i}\tein kleiner Satz {i}\n" for i in range(400))
CHAT = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"what is {i}"}, {"role": "assistant", "content": f"{i}"}]}) + "\n"
    for i in range(200)
)

# beside the models of configs/model: what an option of the architecture changes
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary_grouped": {"position": "rotary", "num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "qk_norm": "rms"},
    "alibi_window": {"position": "alibi", "window": 5},
    "t5_softcap": {"position": "t5", "softcap": 3.0, "activation": "geglu"},
    "sinks": {"sinks": True, "window": (5, None)},
    "learned_scale": {"scale": "learned", "norm_position": "sandwich"},
    "log_length": {"scale": "log_length", "norm_position": "deepnorm"},
    "unscaled": {"scale": "unscaled", "parallel": True},
    "math": {"backend": "math"},
    "chunked": {"backend": "chunked"},
    "chunked_softcap": {"backend": "chunked", "softcap": 3.0, "sinks": True, "position": "t5", "num_kv_heads": 2},
    "chunked_dropout": {"backend": "chunked", "dropout": 0.1},
    "checkpointing": {"checkpointing": True, "dropout": 0.1},
    "folded": {"init": "lecun", "init_fold": "symmetric", "scale": "unscaled"},
    "zero_outputs": {"init_zero_outputs": True, "layer_scale": 0.1, "stochastic_depth": 0.2},
    "linear": {"attention": "linear", "position": "none"},
    "performer": {"attention": "performer", "num_features": 16, "position": "none"},
    "additive": {"attention": "additive", "position": "none"},
    "linformer_encoder": {"attention": "linformer", "num_slots": 4, "architecture": "encoder", "max_len": 13},
    "pooled_encoder": {"architecture": "encoder", "head": "sequence", "num_labels": 3, "pooler": True, "tie_embeddings": False},
    "encoder_none": {"architecture": "encoder", "head": "none", "pooler": True, "tie_embeddings": False},
}


def digest(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """The SHA-256 of tensors with their dtypes and shapes, and the sum of their absolute values."""
    found, total = hashlib.sha256(), 0.0
    for tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(
            tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() and tensor.dim() else repr(tensor.tolist()).encode()
        )
        total += tensor.double().abs().sum().item()
    return {"sha256": found.hexdigest()[:24], "value": total}


def of_model(config: Any) -> dict[str, Any]:
    """Logits and all gradients of a model with fixed weights and inputs, padding included."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {"vocab_size": 97, "num_labels": config.num_labels or 5}
    if config.architecture == "vision":
        fields = {"image_size": 8, "num_channels": 3, "num_labels": 5}
    model = build_model(dataclasses.replace(config, **fields))
    ids, real = torch.randint(97, (2, 13)), torch.ones(2, 13, dtype=torch.bool)
    real[1, :4] = False
    if config.architecture == "vision":
        out = model(torch.randn(2, 3, 8, 8))
    elif config.architecture == "encoder_decoder":
        out = model(ids, ids[:, :7], key_mask=real)
    else:
        out = model(ids, key_mask=real)
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    named = sorted(model.named_parameters())
    return {
        "logits": digest([out]),
        "gradients": digest(p.grad if p.grad is not None else torch.zeros_like(p) for _, p in named),
        "weights": digest(p for _, p in named),
    }


def of_calls() -> dict[str, Any]:
    """The attention function: each backend with each option, forward and backward."""
    found = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "causal": {"is_causal": True}, "softcap": {"softcap": 2.0, "is_causal": True},
        "sinks": {"sinks": torch.linspace(-1, 1, 4)}, "weights": {"need_weights": True}, "unscaled": {"scale": 1.0},
    }  # fmt: skip
    for backend in ("auto", "math", "sdpa", "chunked"):
        for length in (11, 307):
            for name, option in options.items():
                torch.manual_seed(0)
                query = torch.randn(2, 4, length, 8, requires_grad=True)
                key, value = (torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(2))
                try:
                    out = scaled_dot_product_attention(query, key, value, backend=backend, **option)
                except NotImplementedError:
                    continue
                outs = out if isinstance(out, tuple) else (out,)
                outs[0].square().sum().backward()
                found[f"{backend} {length} {name}"] = digest([*outs, query.grad, key.grad, value.grad])
    return found


def of_task(words: list[str]) -> dict[str, Any]:
    """Training batches of two steps, whole and in slices, and the first validation batch."""
    config = compose_config([*words, "trainer.max_steps=9", "data.batch_size=4"])
    data: Any = open_data(config)
    source, val = data.train_source(), data.val_source()
    batches = [*(source[Address(step)] for step in (0, 1, 5)), val[Address(0)]]
    return {"batches": digest(batch[name] for batch in batches for name in sorted(batch))}


def of_experiment(words: list[str], folder: Path) -> dict[str, Any]:
    """Losses and final weights of three steps."""
    keys = ("max_steps=3", "ckpt_every=3", "log_every=1", "val_every=3", "val_batches=1", "val_batch_size=4", "accelerator=cpu")
    small = [*(f"trainer.{key}" for key in (*keys, "threads=1")), "data.batch_size=4", "schedule.warmup_steps=1"]
    config = compose_config([*words, *small, "evaluation.at_end=false", "callbacks.progress=false"])
    run_training(config, folder, "digests")
    rows = (folder / "metrics.csv").read_text().splitlines()
    columns, compared = rows[0].split(","), ("step", "train_loss", "val_loss", "val_accuracy", "grad_norm", "tokens", "lr")
    kept = [i for i, name in enumerate(columns) if name in compared]
    losses = "\n".join(",".join(row.split(",")[i] for i in kept) for row in rows)
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    first = next(row for row in rows[1:] if row.split(",")[columns.index("train_loss")])
    return {
        "losses": {
            "sha256": hashlib.sha256(losses.encode()).hexdigest()[:24],
            "value": float(first.split(",")[columns.index("train_loss")]),
        },
        "final weights": digest(state[name] for name in sorted(state) if isinstance(state[name], Tensor)),
    }


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def everything(place: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of each thing, and a function that computes its digests."""
    (place / "classes.tsv").write_text("text\tlabel\n" + CLASSES, encoding="utf-8")
    (place / "pairs.tsv").write_text(PAIRS, encoding="utf-8")
    (place / "chat.jsonl").write_text(CHAT, encoding="utf-8")
    (place / "text.txt").write_text(
        "".join(f"line {i} of a small text, {i * i % 97}.\n" for i in range(3000)), encoding="utf-8"
    )
    torch.set_num_threads(1)
    for name in sorted(set(names("model")) - {"hf"}):  # which names a folder of the user's
        yield f"model {name}", lambda name=name: of_model(shape_of_node(compose_config([f"model={name}"]).model))
    base = shape_of_node(compose_config([]).model)
    for name, fields in VARIANTS.items():
        sizes: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "num_layers": 2, "max_len": 16}
        yield f"variant {name}", lambda fields={**sizes, **fields}: of_model(dataclasses.replace(base, **fields))
    yield "calls", of_calls
    own = {"text": "text.txt", "pairs": "pairs.tsv", "classify": "classes.tsv", "chat": "chat.jsonl"}
    for name in names("data"):
        if name in ("hf", "images"):  # no file at hand
            continue
        more = [f"data.path={place / own[name]}"] if name in own else []
        more += ["data.context_len=64", "data.tokenizer=char"] if name == "chat" else []
        more += ["data.context_len=64"] if name == "text" else []
        yield f"task {name}", partial(of_task, [f"data={name}", *more])
    yield (
        "task hf",
        partial(of_task, ["data=hf", f"data.path={place / 'text.txt'}", "data.tokenizer=char", "data.context_len=32"]),
    )
    for name in names("experiment"):
        if name.endswith(OF_GRIDS) or name == "finetune":
            continue
        more = {
            "classify": ["data=classify", f"data.path={place / 'classes.tsv'}"],
            "translate_text": ["data=pairs", f"data.path={place / 'pairs.tsv'}"],
        }
        yield f"experiment {name}", partial(of_experiment, [f"experiment={name}", *more.get(name, [])], place / "runs" / name)
    yield (
        "experiment chunk_tokens",
        partial(of_experiment, ["experiment=char_lm", "objective.chunk_tokens=64"], place / "runs" / "chunked"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--only", default="", help="compare only names that begin with this text")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found, failed = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, compute in everything(Path(place)):
            if name.startswith(arguments.only):
                found[name] = compute()
                print(name, *(one["sha256"][:8] for one in found[name].values()), flush=True)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if arguments.record:
        RECORD.write_text(json.dumps({"machine": machine, "digests": found}, indent=1) + "\n", encoding="utf-8")
        return 0
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["digests"]
    for name in sorted(name for name in recorded.keys() | found.keys() if name.startswith(arguments.only)):
        old, new = recorded.get(name), found.get(name)
        if old is None or new is None:
            failed[name] = "is new" if old is None else "is gone"
            continue
        for part in old:
            by_value = any(word in name for word in VALUES_ONLY)
            same = (
                abs(old[part]["value"] - new[part]["value"]) <= 1e-5 * abs(old[part]["value"])
                if by_value
                else old[part] == new[part]
            )
            if not same:
                failed[f"{name}: {part}"] = f"{old[part]} is now {new[part]}"
    for name, what in failed.items():
        print("DIFFERS", name, what)
    print(f"{len(found)} things, {len(failed)} differences")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
