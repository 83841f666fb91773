"""P9: peak memory of a training step with the same loss on a CPU, ours over Hugging Face GPT-2's.

Both sides start from the same weights and hold weights and AdamW's moments already; one step then makes logits and loss, goes
backward, updates and drops the gradients. What counts is the most bytes that torch's allocator has handed out at once during
the step (``minitx.analysis.counting.allocations``: events of torch's profiler, what kernels take for themselves included), plus
weights and moments, which both sides hold anyway. Not resident memory, which keeps what was freed. Bytes are counted,
not sampled: one step a side is enough, and there is no interval.

Ours is the step of the trainer, by config: ``--model`` and ``--objective`` set fields of ``TransformerConfig`` and
``ObjectiveConfig``. Its loss must be Hugging Face's to rounding. The target speaks of the row with both; the others say what
each switch brings.

    python benchmarks/memory.py --model checkpointing=true --objective chunk_tokens=256
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from measure import judged, table, write
from peers import Peer, decoder, hugging_face, loss_of
from torch import Tensor, nn

from minitx.analysis.counting import allocations
from minitx.config import ObjectiveConfig, OptimizerConfig
from minitx.nn import DecoderLM
from minitx.training.module import TrainingModule
from minitx.training.objectives import build_objective
from minitx.training.optimizers import build_optimizer

WANTED = "<= 0.5"


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the weights and of AdamW's moments."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def peak_of(module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> tuple[int, int, float]:
    """(most bytes at once in a step beyond what is held, bytes held, the loss before any update)."""
    losses: list[float] = []

    def step() -> None:
        value = loss()
        losses.append(float(value.detach()))
        value.backward()
        del value
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # makes the moments
    return allocations(step)[1], held(module, optimizer), losses[0]


def theirs(peer: Peer, ids: Tensor, labels: Tensor) -> tuple[int, int, float]:
    """Hugging Face's step."""
    peer.module.train()
    optimizer = torch.optim.AdamW(peer.module.parameters(), fused=True)
    return peak_of(peer.module, optimizer, lambda: loss_of(peer.logits(ids), labels))


class Alone:
    """What ``TrainingModule.training_step`` asks of a trainer."""

    accumulate_grad_batches, world_size, global_step = 1, 1, 0
    distributed_sampler_kwargs = None


ALONE = Alone()  # a module keeps a weak reference to its trainer


def ours(peer: Peer, batch: dict[str, Tensor], model: dict[str, Any], objective: dict[str, Any]) -> tuple[int, int, float]:
    """The step of the training module with fields of the configs set."""
    network = DecoderLM(dataclasses.replace(peer.ours.config, **model))
    network.load_state_dict(peer.ours.state_dict())
    module = TrainingModule(
        network.train(),
        build_objective(ObjectiveConfig(**objective)),
        lambda net: build_optimizer(network=net, node=OptimizerConfig()),
        lambda optimizer: None,
    )
    module.trainer = ALONE  # type: ignore[assignment]
    return peak_of(network, module.make_optimizer(network), lambda: module.training_step(batch, 0))


def fields(text: str) -> dict[str, Any]:
    """``a=1`` ``b=true`` as values: JSON where it is JSON, else text."""
    name, _, value = text.partition("=")
    try:
        return {name: json.loads(value)}
    except ValueError:
        return {name: value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--model", nargs="*", default=["checkpointing=true"], help="fields of TransformerConfig")
    parser.add_argument("--objective", nargs="*", default=["chunk_tokens=256"], help="fields of ObjectiveConfig")
    given = parser.parse_args()
    model, objective = ({k: v for text in texts for k, v in fields(text).items()} for texts in (given.model, given.objective))
    torch.manual_seed(0)
    peer = hugging_face(decoder(given.vocabulary, given.width, given.layers, given.context))
    ids, labels = torch.randint(given.vocabulary, (2, given.batch_size, given.context)).unbind()
    batch = {"input_ids": ids, "labels": labels, "num_targets": torch.tensor(labels.numel())}
    base = theirs(peer, ids, labels)
    switches = {"as it is": ({}, {}), " ".join(given.model): (model, {}), " ".join(given.objective): ({}, objective)}
    switches[" ".join([*given.model, *given.objective])] = (model, objective)  # the row that the target speaks of, last
    rows = []
    for name, (fields_of_model, fields_of_objective) in switches.items():
        if not name:
            continue
        peak, kept, loss = ours(peer, batch, fields_of_model, fields_of_objective)
        if abs(loss - base[2]) > 1e-4 * base[2]:
            raise SystemExit(f"error: {name} has the loss {loss}, Hugging Face {base[2]}")
        wanted = WANTED if fields_of_model == model and fields_of_objective == objective else None
        ratio = (peak + kept) / (base[0] + base[1])
        more = {"peak_bytes": peak, "held_bytes": kept, "a_peak_bytes": base[0], "a_held_bytes": base[1], "loss": loss}
        rows.append(judged(f"{name} / Hugging Face", {"median": ratio, "low": ratio, "high": ratio}, wanted, **more))
        rows.append(
            judged(f"{name}, weights and moments left out", dict.fromkeys(("median", "low", "high"), peak / base[0]), None)
        )
        print(
            f"{name}: {(peak + kept) / 2**20:.0f} MiB, Hugging Face {sum(base[:2]) / 2**20:.0f} MiB; loss {loss:.5f}",
            flush=True,
        )
    print("\n" + table(rows))
    shape = f"{given.layers} layers of width {given.width}, vocabulary {given.vocabulary}, {given.batch_size} x {given.context}"
    title = f"Peak memory of a training step over Hugging Face GPT-2's: {shape}, float32"
    print(write("memory", {"target": "P9", "title": title, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
