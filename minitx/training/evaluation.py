"""Evaluate a trained model on its task: metrics with 95 % intervals, baselines, and some answers.

A mean over rows is a ratio of sums, and its interval comes from the delta method (Cochran 1977, "Sampling Techniques", §6.3). A
share has Wilson's interval (1927, *JASA* 22, 209–212). sacrebleu bootstraps BLEU and chrF over rows (Koehn 2004, EMNLP).
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from minitx.config import EvaluationConfig
from minitx.config.schema import read, require
from minitx.config.training import Model
from minitx.data.batches import Address, ValSource
from minitx.data.splits import as_split
from minitx.data.tables import share_of
from minitx.data.task import Batch, Task, select_rows
from minitx.data.task_loading import task_of_loaders
from minitx.generation import beam_search, generate
from minitx.generation.reader import longest_of
from minitx.nn.modes import evaluating
from minitx.training.input_dtype import in_own_dtype
from minitx.training.net import Net
from minitx.training.network_building import network_of
from minitx.training.objectives import CrossEntropy, Objective, sums_of_rows
from minitx.training.processes import whole_state

if TYPE_CHECKING:
    import lightning.pytorch as L

    from minitx.data.datamodule import DataModule
    from minitx.training.module import TrainingModule

log = logging.getLogger(__name__)

Z95 = 1.959963984540054
_NO_LABEL = "data: there is nothing to evaluate: no label counts"

EVALUATED_KINDS = ("language_model", "masked_lm", "classify", "seq2seq")
"""The kinds of tasks with their own metrics."""


@dataclass(frozen=True)
class Metric:
    """A mean with its 95 % interval (None if there are too few rows), over ``count`` labels, rows or other units (``unit``)."""

    value: float
    low: float | None
    high: float | None
    count: int
    unit: str = "labels"


@dataclass
class Evaluation:
    """Metrics by name, baselines, and some answers with their references.

    Attributes:
        signatures: how sacrebleu computed BLEU and chrF, by metric (Post 2018, arXiv:1804.08771).
        rows: the number of rows in the metrics.
        of_rows: the number of rows of the split.
        left_out: sentences on how many rows of the data are left out of the split or truncated, and why.
    """

    metrics: dict[str, Metric] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    examples: list[dict[str, str]] = field(default_factory=list)
    rows: int = 0
    of_rows: int = 0
    left_out: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return lines to print: each number, the number of rows, the sentences of ``left_out``, and the answers."""
        width = max(map(len, ["rows", *self.metrics, *self.baselines]))
        out = [f"{name:{width}}  {m.value:.4f}  ({_interval(m)}{m.count:,} {m.unit})" for name, m in self.metrics.items()]
        out += [f"{name:{width}}  {value:.4f}" for name, value in self.baselines.items()]
        out.append(f"{'rows':{width}}  {self.rows:,}" + (f" of {self.of_rows:,}" if self.rows < self.of_rows else ""))
        out += [f"{'':{width}}  {sentence}" for sentence in self.left_out]
        out += [f"{'':{width}}  {name} of sacrebleu: {signature}" for name, signature in self.signatures.items()]
        for example in self.examples:
            out += ["", *(f"  {part:7} {text}" for part, text in example.items())]
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def _interval(metric: Metric) -> str:
    low, high = (None if end is None else f"{end:.4f}" for end in (metric.low, metric.high))
    return "" if low == high else f"{low} to {high}, "


def ratio_interval(sums: Tensor, counts: Tensor) -> Metric:
    """Return Σ sums / Σ counts over rows (N,), with its interval. The sampling unit is a row. A single row has no interval.

    >>> ratio_interval(torch.tensor([2.0, 4.0]), torch.tensor([2, 2])).value
    1.5
    """
    sums, counts = sums.double(), counts.double()
    rows = len(sums)
    total = float(counts.sum())
    require(total > 0, _NO_LABEL)
    value = float(sums.sum()) / total
    if rows < 2:
        return Metric(value, None, None, int(total))
    residuals = sums - value * counts
    error = math.sqrt(rows / (rows - 1) * float(residuals.square().sum())) / total
    return Metric(value, value - Z95 * error, value + Z95 * error, int(total))


def accuracy_interval(right: Tensor, counts: Tensor) -> Metric:
    """Return the share of correct answers, with its interval.

    It is Wilson's if each row has one label that is right or wrong, else ``ratio_interval``'s, clipped to [0, 1].

    >>> accuracy_interval(torch.tensor([0, 0, 1]), torch.tensor([2, 2, 2])).low
    0.0
    >>> accuracy_interval(torch.tensor([0.5, 0.75]), torch.tensor([1, 1])).value
    0.625
    """
    if bool((counts == 1).all()) and bool((right == right.round()).all()):
        return share_interval(int(right.sum()), len(right))
    metric = ratio_interval(right, counts)
    if metric.low is None or metric.high is None:
        return metric
    return replace(metric, low=max(metric.low, 0.0), high=min(metric.high, 1.0))


def share_interval(hits: int, trials: int) -> Metric:
    """Return a share with Wilson's interval.

    >>> round(share_interval(0, 100).high, 4)
    0.037
    """
    from scipy.stats import binomtest

    interval = binomtest(hits, trials).proportion_ci(method="wilson")
    return Metric(hits / trials, float(interval.low), float(interval.high), trials, "rows")


def evaluate(
    network: nn.Module,
    data: Task | L.LightningDataModule,
    options: EvaluationConfig | None = None,
    objective: Objective | None = None,
    *,
    batch_size: int = 64,
    split: Literal["val", "test"] = "val",
) -> Evaluation:
    """Evaluate ``network`` on a split of ``data``, with the metrics of its task.

    * ``language_model``: loss in nats, next-token accuracy, and bits per byte and per character if these are known.
    * ``masked_lm``: perplexity and accuracy on masked tokens.
    * ``classify``: accuracy.
    * ``seq2seq``: exact matches, chrF and BLEU of generated answers, and the same for copies of the source.
    * other tasks: the means of the objective's sums. The objective is called for every row. There are no intervals if the
      network does not return one output per row.

    The network runs in evaluation mode; its mode is restored afterwards.

    Args:
        data: the data.
        objective: the objective of the run. Default: cross-entropy.
        batch_size: number of rows in a batch.
        split: ``val`` or ``test``. Baselines of tasks without generated answers exist only for ``val``.

    Raises:
        ConfigError: ``data`` is neither a ``Task`` nor a ``LightningDataModule``, or has no test split.
    """
    options, objective = options or EvaluationConfig(), objective or CrossEntropy()
    task = data if isinstance(data, Task) else task_of_loaders(data)[0]
    require(split == "val" or task.test is not None, f"split={split}: the data has no test split")
    source = ValSource(as_split(task, split), batch_size=batch_size)
    baselines = task.baselines if split == "val" else dict
    count = min(options.num_rows or source.num_rows, source.num_rows)
    net = Net.of(network)
    rows: dict[str, Any] = {"rows": count, "of_rows": source.num_rows, "left_out": [*task.left_out.get(split, ())]}
    with objective_on(_device_of(network), objective), evaluating(network), torch.inference_mode():
        has_answers = (
            task.kind == "seq2seq" and len(task.val_examples if split == "val" else task.test_examples) == source.num_rows
        )
        has_metrics = task.kind in EVALUATED_KINDS and (has_answers or task.kind != "seq2seq")
        sums = _sums_of_split(net, source, options, objective)
        if not has_metrics or not isinstance(objective, CrossEntropy):
            return Evaluation(_of_sums(**sums), dict(baselines()), **rows)
        real = sums["count"] > 0  # without rows that only fill up a batch
        require(bool(real.any()), _NO_LABEL)
        nll, right, counts = (sums[name][real] for name in ("loss", "correct", "count"))
        if task.kind == "seq2seq":
            evaluation = _of_answers(network, task, split, source, options, ratio_interval(nll, counts), 2 * int(counts.max()))
            return replace(evaluation, **rows)
        rows["left_out"] += share_of(count - len(counts), count, "rows are left out: none of their labels counts")
        return Evaluation(_of_labels(task, nll, counts, right), baselines(), **{**rows, "rows": len(counts)})


@contextmanager
def objective_on(device: torch.device, objective: Objective) -> Iterator[None]:
    """A context that moves the tensors of an objective, such as class weights, to ``device``. Each is put back at its end."""
    module = objective if isinstance(objective, nn.Module) else nn.Module()
    before = [
        (owner, name, tensor, tensor.data)
        for owner in module.modules()
        for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    ]
    module.to(device)
    try:
        yield
    finally:
        for owner, name, tensor, data in before:
            tensor.data = data
            setattr(owner, name, tensor)


def _device_of(network: nn.Module) -> torch.device:
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))


def _batches(net: Net, source: ValSource, options: EvaluationConfig) -> Iterator[Batch]:
    """Yield validation batches on the device of the network, with at most ``num_rows`` rows in total."""
    device = _device_of(net.network)
    left = options.num_rows or math.inf
    for step in range(len(source)):
        batch = source[Address(step)]
        net.check(batch, source.split.key_masks.values())
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        rows = int(min(left, len(batch["labels"])))
        yield select_rows(batch, slice(rows))
        left -= rows
        if left == 0:
            return


def _sums_of_split(net: Net, source: ValSource, options: EvaluationConfig, objective: Objective) -> dict[str, Tensor]:
    """Return the sums of every row by name (N,); of the whole split (1,) if the network does not return one output per row."""
    columns = defaultdict[str, list[Tensor]](list)
    by_row = True
    for batch in _batches(net, source, options):
        logits = net(batch)
        by_row = by_row and len(logits) == len(batch["labels"])
        for name, values in sums_of_rows(objective, logits, batch).items():
            columns[name].append(values.cpu().double())
    sums = {name: torch.cat(column) for name, column in columns.items()}
    return sums if by_row else {name: column.sum(0, keepdim=True) for name, column in sums.items()}


def _of_sums(count: Tensor, **sums: Tensor) -> dict[str, Metric]:
    """Return the mean of every sum of an objective."""
    return {
        "accuracy" if name == "correct" else name: (accuracy_interval if name == "correct" else ratio_interval)(column, count)
        for name, column in sums.items()
    }


def _of_labels(task: Task, nll: Tensor, counts: Tensor, right: Tensor) -> dict[str, Metric]:
    """Return the metrics of a task that is evaluated by its labels."""
    loss, accuracy = ratio_interval(nll, counts), accuracy_interval(right, counts)
    if task.kind == "classify":
        return {"accuracy": accuracy}
    if task.kind == "masked_lm":
        low, high = (None if end is None else math.exp(end) for end in (loss.low, loss.high))
        return {"masked_perplexity": Metric(math.exp(loss.value), low, high, loss.count), "masked_accuracy": accuracy}
    bits = {f"bits_per_{unit}": ratio_interval(nll * factor, counts) for unit, factor in task.bits_per.items()}
    return bits | {"loss": loss, "next_token_accuracy": accuracy}


def _of_answers(
    network: nn.Module, task: Task, split: str, source: ValSource, options: EvaluationConfig, loss: Metric, longest: int
) -> Evaluation:
    """Return the metrics of generated answers of at most ``longest`` tokens, and the loss."""
    from sacrebleu.metrics import BLEU, CHRF

    answers = list(_answers(network, task, source, options, longest))
    examples = task.val_examples if split == "val" else task.test_examples
    pairs = examples[: len(answers)]
    sources, references = [source for source, _ in pairs], [str(reference) for _, reference in pairs]
    hits = [answer == reference for answer, reference in zip(answers, references, strict=True)]
    evaluation = Evaluation({"exact_match": share_interval(sum(hits), len(hits))})
    evaluation.baselines["copy_exact_match"] = sum(source == target for source, target in examples) / max(len(examples), 1)
    for name, metric in {"chrf": CHRF(), "bleu": BLEU()}.items():
        evaluation.metrics[name] = _corpus_score(metric, answers, references)
        evaluation.baselines[f"{name}_of_copying"] = float(metric.corpus_score(sources, [references]).score)
        evaluation.signatures[name] = str(metric.get_signature())
    evaluation.metrics["loss"] = loss
    wrong = [i for i, hit in enumerate(hits) if not hit]
    for i in (wrong + [i for i, hit in enumerate(hits) if hit])[: options.num_shown]:
        evaluation.examples.append({"source": sources[i], "answer": answers[i], "right": references[i]})
    return evaluation


def _answers(network: nn.Module, task: Task, source: ValSource, options: EvaluationConfig, longest: int) -> Iterator[str]:
    """Yield the generated answer to every validation row, as text."""
    assert task.tokenizer is not None
    answer_to = generate if options.num_beams == 1 else partial(beam_search, num_beams=options.num_beams)
    longest = min(longest, longest_of(network))
    for batch in _batches(Net.of(network), source, options):
        answers = answer_to(network, batch["input_ids"], key_mask=batch.get("key_mask"), max_new_tokens=longest)
        yield from (task.tokenizer.decode(answer.tolist()) for answer in answers)


def _corpus_score(metric: Any, answers: Sequence[str], references: Sequence[str]) -> Metric:
    """Return sacrebleu's score of the corpus, with the interval of its bootstrap. If a resampled score is zero, there may be none."""
    value, count = float(metric.corpus_score(answers, [references]).score), len(answers)
    try:
        score = type(metric)().corpus_score(answers, [references], n_bootstrap=1000)
    except TypeError:  # sacrebleu's mean of chrF scores fails if some scores are zero
        return Metric(value, None, None, count, "rows")
    shown = json.loads(score.format(width=6, is_json=True, signature=str(metric.get_signature())))
    if "confidence" not in shown:
        return Metric(value, None, None, count, "rows")
    mean, half = shown["confidence_mean"], shown["confidence_var"]
    return Metric(value, max(mean - half, 0.0), min(mean + half, 100.0), count, "rows")


def report(evaluation: Evaluation, folder: Path, split: str = "val") -> None:
    """Write an evaluation to the log, and to ``evaluation.json`` (``val``) or ``evaluation_test.json`` (``test``)."""
    from minitx.crash_safe import naming

    path = folder / ("evaluation.json" if split == "val" else f"evaluation_{split}.json")
    with naming(path):
        path.write_text(json.dumps(evaluation.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for line in evaluation.lines():
        log.info("%s", line)


# --- after training


def evaluate_splits(
    trainer: L.Trainer,
    module: TrainingModule,
    data: DataModule,
    options: EvaluationConfig,
    folder: Path,
    node: Mapping[str, Any],
) -> dict[str, Any]:
    """Evaluate the trained network according to ``options``, and return the last logged metrics, with the test split's.

    Args:
        node: the node that rebuilds the network, if it is sharded.

    Raises:
        ConfigError: ``evaluation.test=best``, but there is no best.ckpt.
    """
    from lightning.pytorch.callbacks import WeightAveraging

    from minitx.training.lightning_private import drop_average

    metrics = dict(trainer.callback_metrics)

    def print_metrics(split: Literal["val", "test"]) -> None:
        network = unsharded(module, node)
        if trainer.is_global_zero:
            rows = data.val_batch_size(1)
            evaluation = partial(evaluate, network, data.task, options, module.objective, batch_size=rows, split=split)
            report(evaluate_on(trainer.strategy.root_device, network, evaluation), folder, split)

    if options.at_end:  # first, because the test may load the best weights
        print_metrics("val")
    if options.test is not None:
        best = folder / "checkpoints" / "best.ckpt" if options.test == "best" else None
        require(
            best is None or best.exists(),
            f"evaluation.test=best: there is no best.ckpt, because trainer.monitor={module.options.monitor} was never logged",
        )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):  # it would test the trained weights instead of the average
                drop_average(callback)
        trainer.test(module, datamodule=data, ckpt_path=best, weights_only=True, verbose=False)
        tested = dict(trainer.callback_metrics)
        total = len(as_split(data.task, "test"))
        rows = min(total, sum(map(int, trainer.num_test_batches)) * data.val_batch_size(trainer.world_size))
        numbers = "  ".join(f"{name} {float(value):.4f}" for name, value in tested.items())
        log.info("test  %s  (%s rows)", numbers, f"{rows:,}" if rows == total else f"{rows:,} of {total:,}")
        metrics |= tested
        if options.at_end:
            print_metrics("test")
    return metrics


def evaluate_on(device: torch.device, network: nn.Module, evaluation: Callable[[], Evaluation]) -> Evaluation:
    """Return ``evaluation()``, computed with ``network`` on ``device``, or on the CPU if the device runs out of memory.

    Lightning moves the network to the CPU after training, and this function returns it there. A sharded network is evaluated as
    an unsharded copy, and this copy may not fit on the device.
    """
    try:
        network.to(device)
        return evaluation()
    except torch.OutOfMemoryError:
        log.warning("evaluation: %s has too little memory for the unsharded model: it is evaluated on the CPU", device)
    finally:
        network.cpu()
    return evaluation()


def unsharded(module: TrainingModule, node: Mapping[str, Any]) -> nn.Module:
    """Return the network with unsharded weights. With ``trainer.strategy=sharded``, this is a copy on the CPU and a collective operation."""
    if module.options.strategy != "sharded":
        return module.network
    weights = whole_state(module.network)
    network = network_of(read(Model, node, "model"))
    network.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    in_own_dtype(network)
    return network
