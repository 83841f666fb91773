"""Objectives: functions of (logits, batch) that return *sums*. The caller divides by the number of targets of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import IGNORED, ConfigError, Part
from minitx.config.schema import Count, Share, require
from minitx.data.task import Batch, counting, num_targets, select_rows

Sums = dict[str, Tensor]
"""0-d sums over the counted targets: ``loss``, and optionally ``correct`` (number of correct answers) and ``nll`` (the
validation loss, if it differs from ``loss``). Further sums are logged as means. ``count`` is not allowed as a name."""

Objective = Callable[[Tensor, Batch], Tensor | Sums]


class CrossEntropy:
    """-Σ ln softmax(logits)[label] over the labels that are not -100.

    The run divides by the number of labels of a whole optimizer step.

    Args:
        label_smoothing: share of the target probability spread over all classes (ε of Szegedy et al. 2016, arXiv:1512.00567, §7).
        chunk_tokens: with head=lm, compute logits for this many tokens at a time, such as 1024, to save memory; null: all.
        count_correct: count correct answers in training, for train_accuracy.
    """

    def __init__(self, label_smoothing: Share = 0.0, chunk_tokens: Count | None = None, count_correct: bool = True) -> None:
        self.label_smoothing, self.chunk_tokens, self.count_correct = label_smoothing, chunk_tokens, count_correct

    def __call__(self, logits: Tensor, batch: Batch) -> Sums:
        count = self.count_correct or not torch.is_grad_enabled()
        return cross_entropy(logits, batch["labels"], label_smoothing=self.label_smoothing, count_correct=count)

    def of_hidden(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, batch: Batch) -> Sums:
        """Return the sums for hidden states and the parameters of a linear head. Logits are computed in chunks."""
        assert self.chunk_tokens is not None
        options: dict[str, Any] = {"chunk_tokens": self.chunk_tokens, "label_smoothing": self.label_smoothing}
        return chunked_cross_entropy(hidden, weight, bias, batch["labels"], **options)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, count_correct: bool = True, by_row: bool = False
) -> Sums:
    """Return -Σ ln softmax(logits)[label] over the labels that are not -100, in at least float32.

    Args:
        logits: (..., V).
        labels: int (...), -100 at positions that do not count.
        label_smoothing: see ``CrossEntropy``.
        count_correct: also return ``correct``, the number of labels with the highest logit.
        by_row: return sums of each row (B,), in float64 on the CPU, for evaluation.

    Raises:
        ConfigError: the shapes do not match, for example logits per token but labels per text; or a label is not a class.

    >>> sums = cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]]))
    >>> round(float(sums["loss"]) / 2, 4)  # ln 4
    1.3863
    """
    if logits.shape[:-1] != labels.shape:
        raise ConfigError(
            f"the model returned logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}: cross-entropy "
            "needs one row of logits (..., V) for each label (...)"
        )
    flat, targets = logits.flatten(0, -2), labels.flatten()
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if targets.dtype == torch.bool or targets.is_floating_point():
        raise _not_classes(flat, f"got {targets.dtype}".replace("torch.", ""))
    try:
        nll = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="none" if by_row else "sum")
    except IndexError as error:  # only on a CPU; a GPU stops with an error that does not mention labels
        raise _not_classes(flat, error) from None
    if by_row:  # on the CPU, because Apple's GPU has no float64
        correct = (flat.argmax(-1) == targets) & (targets != IGNORED)
        columns = {"loss": nll, "correct": correct}
        return {name: each.reshape(len(labels), -1).cpu().double().sum(-1) for name, each in columns.items()}
    sums = {"loss": nll, "nll": nll.detach()}
    if label_smoothing:
        sums["loss"] = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    if count_correct:
        sums["correct"] = ((flat.detach().argmax(-1) == targets) & (targets != IGNORED)).sum()
    return sums


def _not_classes(logits: Tensor, reason: object) -> ConfigError:
    V = logits.shape[-1]
    return ConfigError(
        f"the model returns {V} logit{'s' * (V != 1)} for each label, so labels must be classes from 0 to {V - 1}, or {IGNORED} where they "
        f"do not count: {reason}"
    )


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, chunk_tokens: int, label_smoothing: float = 0.0
) -> Sums:
    """Return ``cross_entropy(hidden @ weight.T + bias, labels)``, with the logits of only ``chunk_tokens`` tokens in memory.

    For T tokens and a vocabulary of V, the usual loss keeps T x V logits for the backward pass. In a small model, they take
    most of the memory. Here the gradient of each chunk is computed in the forward pass, and its logits Z are then freed:

        dZ = softmax(Z) - (1 - ε) onehot(label) - ε / V    dhidden = dZ W    dW = Σ dZᵀ hidden    dbias = Σ dZ

    The backward pass only multiplies by the gradient of the loss. The number of operations and, up to rounding, the results are
    the same as usual. dW is summed in at least float32. The loss is not twice differentiable. The method is described in
    Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", arXiv:2411.09009, §3; their kernel is not used.

    Args:
        hidden: float (..., E), the input of the head.
        weight: (V, E), possibly tied to the embeddings.
        bias: (V,) or None.
        labels: int (...), -100 at positions that do not count.
        chunk_tokens: the number of tokens in a chunk. A chunk needs memory for 2 to 3 x ``chunk_tokens`` x V numbers.
        label_smoothing: ε, as in ``cross_entropy``.

    Raises:
        ValueError: ``chunk_tokens`` is below 1, shapes do not match, or (as ConfigError) a label is not a class.

    >>> hidden, weight = torch.randn(2, 3, 5), torch.randn(7, 5)
    >>> labels = torch.tensor([[0, 1, -100], [2, 3, 6]])
    >>> chunked = chunked_cross_entropy(hidden, weight, None, labels, chunk_tokens=4)
    >>> bool(torch.isclose(chunked["loss"], cross_entropy(hidden @ weight.T, labels)["loss"]))
    True
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    if hidden.shape[:-1] != labels.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(
            f"hidden must have shape (..., E), labels (...) and weight (V, E), got {tuple(hidden.shape)}, "
            f"{tuple(labels.shape)} and {tuple(weight.shape)}"
        )
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    needs_grad = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (flat, weight, bias)]
    loss, nll, correct = _LinearCrossEntropy.apply(flat, weight, bias, targets, chunk_tokens, label_smoothing, needs_grad)
    return {"loss": loss, "nll": nll, "correct": correct}


class _LinearCrossEntropy(torch.autograd.Function):
    """Return (loss, nll, correct) of ``chunked_cross_entropy``, and compute the gradients that ``needs_grad`` selects."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk_tokens: int,
        smoothing: float,
        needs_grad: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(narrow, torch.float32)
        w, b = weight.to(narrow), None if bias is None else bias.to(narrow)  # cast once; autocast would cast for every chunk
        loss, nll, correct = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide), labels.new_zeros(())
        grads = [
            torch.zeros_like(x, dtype=dtype) if needed and x is not None else None
            for x, needed, dtype in zip((hidden, weight, bias), needs_grad, (hidden.dtype, wide, wide), strict=True)
        ]
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                h, target = hidden[part].to(narrow), labels[part]
                logits = F.linear(h, w, b).to(wide)  # (chunk, V)
                sums = cross_entropy(logits, target, label_smoothing=smoothing)
                loss, nll, correct = loss + sums["loss"], nll + sums["nll"], correct + sums["correct"]
                if any(needs_grad):
                    _add_gradients(grads, _gradient(logits, target, smoothing).to(narrow), h, w, part)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(nll, correct)
        return loss, nll, correct

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True would treat the stored gradients as constants
            raise RuntimeError("the chunked cross-entropy is not twice differentiable; objective.chunk_tokens=null is")
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # multiply in the precision of the loss: 1 / tokens rounded to bfloat16 would scale all gradients with an error of up to 1/256
        gradients = [None if g is None else (g.to(d_loss.dtype) * d_loss).to(dtype) for g, dtype in pairs]
        return *gradients, None, None, None, None


def _gradient(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return d loss / d logits of a chunk; 0 at positions that do not count."""
    hit = target.clamp(min=0).unsqueeze(-1)
    d_logits = logits.softmax(-1).sub_(smoothing / logits.shape[-1])
    d_logits.scatter_add_(-1, hit, torch.full_like(hit, smoothing - 1.0, dtype=d_logits.dtype))
    return d_logits.masked_fill_((target == IGNORED).unsqueeze(-1), 0.0)


def _add_gradients(grads: list[Tensor | None], d_logits: Tensor, hidden: Tensor, weight: Tensor, part: slice) -> None:
    """Add the gradients of a chunk to its rows of d_hidden, and to d_weight and d_bias."""
    d_hidden, d_weight, d_bias = grads
    if d_hidden is not None:
        d_hidden[part] = d_logits @ weight
    if d_weight is not None:
        if d_weight.dtype == d_logits.dtype:
            torch.addmm(d_weight, d_logits.mT, hidden, out=d_weight)  # without a temporary (V, E)
        else:
            d_weight += d_logits.mT @ hidden
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=d_bias.dtype)


def build_objective(part: Part) -> Objective:
    """Build the objective of a part.

    A torch loss with ``reduction="sum"`` is called with (logits, labels). A loss over classes is called with shapes (targets,
    classes) and (targets,).

    Raises:
        ConfigError: the target cannot be built, or the loss averages, ignores a label other than -100, or has trainable
            weights.
    """
    objective = part.build_function(2)
    kind = type(objective).__name__
    require(callable(objective), f"objective={kind} must be callable with (logits, batch), and return a sum over the targets")
    if not isinstance(objective, nn.Module):
        return objective
    for name, parameter in objective.named_parameters():
        require(
            not parameter.requires_grad,
            f"objective: {kind} has a weight {name}, but no optimizer trains it: move it into the model",
        )
    if not type(objective).__module__.startswith("torch.nn."):
        return objective
    reduction = getattr(objective, "reduction", None)
    ignored = getattr(objective, "ignore_index", IGNORED)
    require(
        reduction == "sum",
        f"objective.reduction={reduction} must be sum: minitx divides by the number of targets of the whole step, on all devices",
    )
    require(ignored == IGNORED, f"objective.ignore_index={ignored} must be {IGNORED}, the label of positions that do not count")
    return TorchLoss(objective)


_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


class TorchLoss(nn.Module):
    """An objective that calls a loss of torch."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss
        if not isinstance(loss, _OF_CLASSES):  # one loss per label, so that labels that do not count can be masked
            self.loss = copy(loss)
            self.loss.reduction = "none"

    def forward(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the loss of (logits, labels), over the labels that count: not -100, or not NaN.

        Raises:
            ConfigError: the shapes of logits and labels do not match the kind of loss, or the loss returns one number for
                several labels.
        """
        labels = batch["labels"]
        name = type(self.loss).__name__
        shapes = f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}"
        if isinstance(self.loss, _OF_CLASSES):
            require(
                logits.shape[:-1] == labels.shape,
                f"objective: {name} needs classes as labels (not probabilities), and logits with one more axis at the end for the classes; "
                f"got {shapes}",
            )
            return {"loss": self.loss(logits.flatten(0, -2), labels.flatten())}
        require(
            logits.shape == labels.shape,
            f"objective: {name} compares each logit with its label, so the logits must have the shape of the labels; got {shapes}",
        )
        ignored = ~counting(labels)
        losses = self.loss(logits, labels.masked_fill(ignored, 0))
        require(
            losses.shape == labels.shape,
            f"objective: {name} returns one number for several labels, but minitx divides by the number of labels: use a function that "
            "sums over labels",
        )
        return {"loss": losses.masked_fill(ignored, 0.0).sum()}


@torch.no_grad()
def checked_sums(result: Tensor | Mapping[str, Tensor]) -> Sums:
    """Return the result of an objective as a dict of sums.

    Raises:
        ConfigError: ``loss`` is missing, a value is not a 0-d tensor, or a name is the name of another metric.
    """
    sums = dict(result) if isinstance(result, Mapping) else {"loss": result}
    wrong = [name for name, value in sums.items() if not isinstance(value, Tensor) or value.dim()]
    if "loss" not in sums or wrong:
        fault = f"{wrong[0]} is {_describe(sums[wrong[0]])}" if wrong else f"got {', '.join(sums) or 'nothing'}"
        raise ConfigError(
            f"objective must return a 0-d tensor, or a mapping from names to 0-d tensors that includes loss: {fault}"
        )
    require("count" not in sums, "objective returns a sum named count, the name of the number of targets: rename it")
    require(
        not {"correct", "accuracy"} <= sums.keys(),
        "objective returns the sums correct and accuracy, but the mean of correct is logged as accuracy: rename one of them",
    )
    return sums


def validation_sums(sums: Sums, labels: Tensor) -> Sums:
    """Return the sums of a validation batch: with ``nll``, if there is one, as ``loss``, and with the number of targets as ``count``."""
    others = {name: value for name, value in sums.items() if name != "nll"}
    return {**others, "loss": sums.get("nll", sums["loss"]), "count": num_targets(labels)}


def sums_of_rows(objective: Objective, logits: Tensor, batch: Batch) -> Sums:
    """Return ``validation_sums`` of each row (B,); of the whole batch (1,) if there is not one output per row."""
    labels = batch["labels"]
    if len(logits) != len(labels):
        parts = [validation_sums(checked_sums(objective(logits, batch)), labels)]
    elif isinstance(objective, CrossEntropy):
        counts = (labels != IGNORED).reshape(len(labels), -1).sum(-1)
        return {**cross_entropy(logits, labels, by_row=True), "count": counts}
    else:
        rows = [slice(i, i + 1) for i in range(len(labels))]
        parts = [validation_sums(checked_sums(objective(logits[row], select_rows(batch, row))), labels[row]) for row in rows]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def check_same_names(sums: Iterable[str], before: Iterable[str]) -> None:
    """Raise a ConfigError if the sums of a batch have other names than in earlier batches."""
    names = [", ".join(sorted({*each} - {"count"})) for each in (sums, before)]
    require(
        names[0] == names[1],
        f"objective must return the same sums for every batch, but it returned {names[1]}, and then {names[0]}",
    )


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
