"""A training step: P1, P1b, P4, P9, P11.

- P1: steps of other people's decoders over ours on the same batch, and over ours under the trainer, eager and with ``trainer.compile``.
  Same architecture, weights and number of parameters; the losses agree before anything is timed. A step is logits, mean
  cross-entropy, backward, fused AdamW. Nobody has dropout, a cache or autocast.
- P1b: our step over the matrix products of its linear layers alone: forward, for the input's gradient and for the weight's; both as a run
  computes them (``minitx.training.onednn``).
- P4: a step under the trainer over a raw loop with the same network, optimizer, data, gradient norm and check for NaN. And a step of a
  LightningModule of ten lines, without logger and checkpoints, over the same loop without norm and check: Lightning's own share.
- P9: the most bytes at once of a step with the same loss, weights and AdamW's moments included, over Hugging Face's. Counted, not timed.
- P11: steps under the trainer with ``callbacks.probe`` each 50 steps over steps without.

Where the trainer takes part, both sides run by turns inside one fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import Row, compare, compared, exact, measure, now, parser, peak, row, turns
from peers import NANOGPT, Peer, check_equal, decoder, decoders, hugging_face, loss_of, nano_gpt
from torch import Tensor, nn

from minitx.nn import DecoderLM
from minitx.nn.transfer import to_device
from minitx.training.devices import cpu_precision, keep_freed_memory
from minitx.training.objectives import chunked_cross_entropy
from minitx.training.onednn import onednn_products

WANTED = {"nanoGPT": ">= 1.05", "Hugging Face GPT-2": ">= 1.2", "x-transformers": ">= 1.2", "nn.TransformerEncoder": ">= 1.0"}
"""By the beginning of a name."""
SIZES = {"E 128, 12 x 64": (65, 128, 4, 64, 12), "E 256, 8 x 256": (65, 256, 4, 256, 8)}
"""Vocabulary, width, layers, context, rows."""
SMALL = next(iter(SIZES))
RUN = ("trainer.val_every=0", "trainer.val_batches=1", "trainer.ckpt_every=0", "callbacks.progress=false")
WARM = 50  # steps of a fit before the first block


def raw_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A step on the same batch, over and over."""
    optimizer = torch.optim.AdamW(module.train().parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ids_and_labels(size: str) -> tuple[Tensor, Tensor]:
    """Random tokens."""
    vocab_size, _, _, context, batch = SIZES[size]
    ids, labels = torch.randint(vocab_size, (2, batch, context))
    return ids, labels


def over_others(pairs: int, size: str) -> Iterator[Row]:
    """P1, raw loops."""
    data = ids_and_labels(size)
    for peer in decoders(decoder(*SIZES[size][:4])):
        loss = check_equal(peer, *data)
        theirs, ours = raw_step(peer.module, partial(peer.loss, *data)), raw_step(peer.ours, partial(peer.our_loss, *data))
        found, wanted = compare(theirs, ours, pairs=pairs), WANTED[peer.name.partition(",")[0]]
        speed = round(data[0].numel() / found["seconds"][1])
        yield row("P1", f"raw loop over {peer.name}", size, found, wanted, loss=loss, tokens_per_second=speed)
    if cpu_precision("bf16-mixed") == "bf16-mixed":
        narrow = torch.autocast("cpu", torch.bfloat16)(partial(peer.our_loss, *data))
        with onednn_products():
            found = compare(ours, raw_step(peer.ours, narrow), pairs=pairs)
        wanted = ">= 1.8" if torch.cpu._is_amx_tile_supported() and SIZES[size][1] >= 256 else None
        yield row("P1", "bfloat16 over float32, products as in a run", size, found, wanted)


def over_products(pairs: int) -> Iterator[Row]:
    """P1b."""
    keep_freed_memory()
    model, (ids, labels) = DecoderLM(decoder(*SIZES[SMALL][:4])), ids_and_labels(SMALL)
    weights = [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)]
    made = [(torch.randn(ids.numel(), w.shape[1]), torch.randn(ids.numel(), w.shape[0]), w) for w in weights]

    def products() -> None:
        for x, gradient, weight in made:
            x @ weight.T, gradient @ weight, gradient.T @ x

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model(ids), labels)

    for name, run, wanted in (("eager", loss, "<= 2.4"), ("compiled", torch.compile(loss), "<= 2.0")):
        with onednn_products():
            found = compare(products, raw_step(model, partial(run, ids, labels)), pairs=pairs, warm=3)
        yield row("P1b", f"step over its matrix products, {name}", SMALL, found, wanted)


# --- inside a fit


class Turns:
    """Blocks of ``steps`` steps inside a fit, in the order of ``turns``; ``callback`` is what Lightning calls.

    A block under the trainer lasts from the beginning of its first step to the beginning of the step after its last, so that all
    that the trainer does between two steps counts.

    Args:
        outside: what makes a block of side A in the trainer's place, called with (trainer, module, steps), and timed.
        before: called with (trainer, side) before each block.
    """

    fits: list[Turns] = []  # noqa: RUF012

    def __init__(
        self, steps: int, pairs: int, outside: Callable[..., None] | None = None, before: Callable[..., None] | None = None
    ) -> None:
        self.steps, self.outside, self.before, self.left = steps, outside, before, turns(pairs)
        self.num_steps = WARM + 1 + steps * sum(side == 1 or outside is None for side in self.left)
        self.blocks: list[tuple[int, float]] = []
        self.running: tuple[int, float] | None = None

    def step(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Before each step: the end of a block and the begin of the next, where it is time."""
        if index < WARM or (index - WARM) % self.steps:
            return
        if self.running is not None:
            self.note(*self.running)
            self.running = None
        while self.left and self.running is None:
            side = self.left.pop(0)
            if self.before is not None:
                self.before(trainer, side)
            if side == 0 and self.outside is not None:
                started = now()
                self.outside(trainer, module, self.steps)
                self.note(side, started)
            else:
                self.running = side, now()

    def note(self, side: int, started: float) -> None:
        self.blocks.append((side, (now() - started) / self.steps))


def callback() -> Any:
    """What ``_target_`` in the config of a fit names."""
    from lightning.pytorch.callbacks import LambdaCallback

    return LambdaCallback(on_train_batch_start=Turns.fits[-1].step)


def fitted(blocks: Turns, *words: str) -> Row:
    """The run that ``words`` ask for, with ``blocks`` inside, and what they say."""
    from minitx.cli.compose import compose_config
    from minitx.training.run import train

    Turns.fits.append(blocks)
    config = compose_config([*RUN, *words, f"trainer.max_steps={blocks.num_steps}", "+callbacks.turns._target_=step.callback"])
    with TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
    return compared(blocks.blocks)


def batches(*words: str) -> tuple[Iterator[dict[str, Tensor]], int]:
    """(the training batches of the small character model, its vocabulary)."""
    from minitx.cli.compose import compose_config
    from minitx.data.datamodule import open_data

    config = compose_config([*words, f"trainer.max_steps={10**9}"])
    data = open_data(config.data, config.trainer, seed=config.seed)
    return iter(data.train_dataloader()), data.task.tokenizer.vocab_size  # type: ignore[union-attr]


def under_the_trainer(pairs: int, steps: int = 25) -> Iterator[Row]:
    """P1, our side under the trainer: batches from its data, schedule, gradient norm, check for NaN, and the log."""
    source, vocab_size = batches()
    config = decoder(vocab_size, *SIZES[SMALL][1:4])
    peer = nano_gpt(config, NANOGPT) if NANOGPT else hugging_face(config)
    batch = next(source)
    theirs = raw_step(peer.module, partial(peer.loss, batch["input_ids"], batch["labels"]))

    def loop(trainer: Any, module: Any, steps: int) -> None:
        with onednn_products(False):
            for _ in range(steps):
                theirs()

    for name, wanted in (("false", WANTED[peer.name]), ("true", ">= 1.25" if NANOGPT else None)):
        found = fitted(Turns(steps, pairs, loop), "trainer.accelerator=cpu", f"trainer.compile={name}")
        yield row("P1", f"trainer, compile={name}, over {peer.name}'s raw loop, eager", SMALL, found, wanted)


def checked_step(network: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> None:
    """A step of a loop that looks at loss and gradient norm, as the trainer does."""
    device = next(network.parameters()).device
    # from page-locked memory, as the trainer
    ids, labels = (to_device(batch[name], device) for name in ("input_ids", "labels"))
    loss = loss_of(network(ids), labels)
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in network.parameters() if p.grad is not None])
    optimizer.found_inf = (~torch.isfinite(norm + loss.detach())).float()  # a fused optimizer then does nothing
    if device.type == "cpu" and optimizer.found_inf:
        raise SystemExit("error: not finite")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trainer_over_loop(pairs: int, *words: str, steps: int = 25, rows: int = 11, wanted: str = "<= 1.03") -> Iterator[Row]:
    """P4. ``words`` of the command line name the device."""
    source, _ = batches(f"data.batch_size={rows}")

    def loop(trainer: Any, module: Any, steps: int) -> None:
        trainer.optimizers[0].zero_grad(set_to_none=True)
        for _ in range(steps):
            checked_step(module.network, trainer.optimizers[0], next(source))

    found = fitted(Turns(steps, pairs, loop), f"data.batch_size={rows}", *words)
    yield row("P4", "trainer over a raw loop", f"E 128, {rows} x 64", found, wanted)


def lightning_over_loop(pairs: int, steps: int = 25, rows: int = 11) -> Iterator[Row]:
    """P4, Lightning's share."""
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import LambdaCallback

    source, vocab_size = batches(f"data.batch_size={rows}")

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = DecoderLM(decoder(vocab_size, *SIZES[SMALL][1:4]))

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return loss_of(self.network(batch["input_ids"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), fused=True)

    def loop(trainer: Any, module: Any, steps: int) -> None:
        optimizer = trainer.optimizers[0]
        for batch in islice(source, steps):
            optimizer.zero_grad(set_to_none=True)
            module.training_step(batch, 0).backward()
            optimizer.step()

    blocks = Turns(steps, pairs, loop)
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [LambdaCallback(on_train_batch_start=blocks.step)]
    trainer = L.Trainer(accelerator="cpu", max_steps=blocks.num_steps, callbacks=callbacks, **silent)  # type: ignore[arg-type]
    keep_freed_memory()
    with onednn_products():
        trainer.fit(Plain(), source)
    yield row("P4", "a bare LightningModule over a raw loop", f"E 128, {rows} x 64", compared(blocks.blocks), None, "lower")


def probed_over_none(pairs: int, *words: str, every: int = 50, rows: int = 12, wanted: str = "<= 1.03") -> Iterator[Row]:
    """P11. ``words`` of the command line name the device."""

    def switch(trainer: Any, side: int) -> None:
        (probe,) = (one for one in trainer.callbacks if type(one).__name__ == "Probe")
        probe.due = lambda step: side == 1 and step % every == 0

    found = fitted(Turns(every, pairs, before=switch), f"callbacks.probe.every={every}", f"data.batch_size={rows}", *words)
    yield row("P11", f"attention statistics each {every} steps over none", f"E 128, {rows} x 64", found, wanted)


# --- memory


def chunked_loss(model: Any, ids: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Our mean cross-entropy without all logits at once; ``model`` may be compiled."""
    hidden = model(ids, return_hidden=True)
    sums = chunked_cross_entropy(hidden, model.head.weight, None, labels, chunk_tokens=chunk_tokens)
    return sums["loss"] / labels.numel()


def most_bytes(module: nn.Module, step: Callable[[], None]) -> int:
    """Of a step of AdamW, with weights and moments."""
    step()  # makes the moments
    return peak(step) + 3 * sum(p.nbytes for p in module.parameters())


def memory(vocabulary: int = 50257, width: int = 384, layers: int = 6, context: int = 512) -> Iterator[Row]:
    """P9."""
    peer: Peer = hugging_face(decoder(vocabulary, width, layers, context))
    data = tuple(torch.randint(vocabulary, (2, 4, context)))
    before = check_equal(peer, *data)
    chunked = partial(chunked_loss, peer.ours, *data, 256)
    if abs(float(chunked().detach()) - before) > 1e-4 * before:
        raise SystemExit("error: the chunked loss is another one")
    theirs = most_bytes(peer.module, raw_step(peer.module, partial(peer.loss, *data)))
    plain, shape = partial(peer.our_loss, *data), f"{layers} x {width}, vocabulary {vocabulary}, 4 x {context}"
    for name, loss in (("as it is", plain), ("chunk_tokens=256", chunked), ("chunk_tokens=256 checkpointing=true", chunked)):
        both = "checkpointing" in name
        peer.ours.config = dataclasses.replace(peer.ours.config, checkpointing=both)  # type: ignore[arg-type, type-var]
        share = exact(most_bytes(peer.ours, raw_step(peer.ours, loss)) / theirs)
        yield row("P9", "peak memory over Hugging Face GPT-2's", f"{shape}, {name}", share, "<= 0.5" if both else None, "lower")


def main() -> None:
    given = parser(__doc__, ("P1", "P1b", "P4", "P9", "P11")).parse_args()
    measure("step", given, {
        "P1": lambda: chain(*(over_others(given.pairs, size) for size in SIZES), under_the_trainer(given.pairs)),
        "P1b": lambda: over_products(given.pairs),
        "P4": lambda: chain(trainer_over_loop(given.pairs), lightning_over_loop(given.pairs)),
        "P9": memory,
        "P11": lambda: probed_over_none(given.pairs),
    })  # fmt: skip


if __name__ == "__main__":
    import step  # what the configs of fits name is this module, not __main__

    step.main()
