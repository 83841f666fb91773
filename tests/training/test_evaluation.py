"""Evaluation: intervals that are what they say, metrics by hand, and the same numbers however rows are batched."""

import dataclasses
import json
import math

import lightning.pytorch as L
import pytest
import torch
from sacrebleu.metrics import BLEU, CHRF
from scipy import stats
from torch.utils.data import DataLoader

from minitx.config import ConfigError, EvaluationConfig, node
from minitx.data.datamodule import DataModule
from minitx.data.task import Task, as_split
from minitx.nn import build_model
from minitx.training import evaluation
from minitx.training.build import network_of, open_data
from minitx.training.evaluation import Evaluation, evaluate, ratio_interval, share_interval

SMALL = {"embed_dim": 12, "num_heads": 3, "num_layers": 1, "init": "lecun"}
DATES = {"_target_": "minitx.data.dates", "locales": ("en", "de"), "train_size": 53, "val_size": 17, "batch_size": 6}
CLASSES = {"_target_": "minitx.data.classify", "tokenizer": "char", "batch_size": 16, "val_fraction": 0.5}
PAIRS = {"_target_": "minitx.data.pairs", "tokenizer": "char", "max_source_len": 12, "max_target_len": 12, "val_fraction": 0.5}
MASKED = {"_target_": "minitx.data.masked", "batch_size": 4, "context_len": 11}
TASKS = {  # data, their file, model
    "seq2seq": (DATES, None, {"architecture": "encoder_decoder", "position": "rotary"}),
    "short seq2seq": (PAIRS, "pairs.tsv", {"architecture": "encoder_decoder", "position": "learned", "max_len": 12}),
    "classify": (CLASSES, "classes.tsv", {"architecture": "encoder", "head": "sequence", "position": "rotary"}),
    "masked_lm": (MASKED, "text.txt", {"architecture": "encoder"}),
}


@pytest.fixture
def ready(make_config, tmp_path):
    """``ready("classify")`` gives a network fitted to opened data."""

    def build(task=None):
        config = make_config()
        if task is not None:
            data, file, model = TASKS[task]
            lines = ["text\tlabel", *(f"word {n * n}\t{'abc'[n % 3]}" for n in range(211))]
            (tmp_path / "classes.tsv").write_text("\n".join(lines))
            (tmp_path / "pairs.tsv").write_text("\n".join(f"{n}\t{'ab' * (n % 5 + 1)}" for n in range(67)))
            data = {**data, "path": str(tmp_path / file)} if file else data
            config = dataclasses.replace(config, data=data, model=node(build_model, **SMALL, **model))
        data = open_data(config)
        torch.manual_seed(3)
        return network_of(config.model, data).double(), data.task

    return build


def test_the_interval_of_a_ratio_is_that_of_many_repeated_samples():
    generator = torch.Generator().manual_seed(0)
    inside, trials = 0, 400
    for _ in range(trials):
        counts = torch.randint(1, 20, (97,), generator=generator)
        sums = counts * (1.5 + torch.randn(97, generator=generator).double() * 0.4)
        found = ratio_interval(sums, counts)
        inside += found.low <= 1.5 <= found.high
        assert found.value == pytest.approx(float(sums.sum() / counts.sum()))
    assert 0.92 <= inside / trials <= 0.98


@pytest.mark.parametrize(("hits", "trials"), [(0, 13), (13, 13), (5, 13), (1990, 2000)])
def test_the_interval_of_a_share_is_wilsons(hits, trials):
    found, want = share_interval(hits, trials), stats.binomtest(hits, trials).proportion_ci(0.95, method="wilson")
    assert (found.low, found.high) == (pytest.approx(want.low, abs=1e-12), pytest.approx(want.high, abs=1e-12))
    assert found.value == hits / trials


def test_data_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="data must be a Task or a LightningDataModule, got list"):
        evaluate(torch.nn.Identity(), [1])


def test_a_language_model_is_judged_in_bits_per_byte_and_character(ready):
    network, data = ready()
    found = evaluate(network, data)
    batch = DataModule(data, batch_size=1).probe_batch(len(as_split(data, "val")))
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(network.eval()(batch["input_ids"]).mT, batch["labels"]))
    assert found.metrics["loss"].value == pytest.approx(loss, rel=1e-12)
    assert found.metrics["loss"].count == int((batch["labels"] != -100).sum())
    assert found.metrics["bits_per_character"].value == pytest.approx(loss / math.log(2), rel=1e-12)
    assert set(found.baselines) >= {"xz_bits_per_character", "bzip2_bits_per_character"}


def test_several_labels_a_row_of_a_classification_count_one_by_one():
    rows = [{"input": torch.eye(3)[row], "labels": torch.tensor([0, 1, 2])} for row in ([0, 1, 2], [0, 1, 1], [0, 0, 2])]
    task = Task(name="mine", kind="classify", train=rows, val=rows, key_masks={})
    found = evaluate(torch.nn.Identity(), task).metrics["accuracy"]
    assert (found.value, found.count) == (pytest.approx(7 / 9), 9)


def test_the_accuracy_of_one_label_a_row_has_wilsons_interval_whatever_the_kind_and_the_objective_are():
    rows = [{"input": torch.eye(3)[n % 3][None], "labels": torch.tensor([n % 3 if n else 1])} for n in range(30)]

    def objective(logits, batch):
        return {"loss": logits.sum(), "correct": (logits.argmax(-1) == batch["labels"]).sum()}

    for kind, own in {"language_model": None, "classify": None, "other": objective}.items():
        task = Task(name="mine", kind=kind, train=rows, val=rows, key_masks={})
        assert share_interval(29, 30) in evaluate(torch.nn.Identity(), task, objective=own).metrics.values()


@pytest.mark.parametrize("task", [None, "classify", "seq2seq", "short seq2seq"])
def test_the_size_of_a_batch_changes_no_metric(ready, task):
    found = []
    for size in (1, 8):
        network, data = ready(task)
        part = next(network.train().children()).eval()
        found.append(evaluate(network, data, batch_size=size))
        assert (network.training, part.training) == (True, False)
    for name, metric in found[0].metrics.items():
        assert found[1].metrics[name].value == pytest.approx(metric.value, rel=1e-10), name
        assert found[1].metrics[name].count == metric.count
    assert found[0].baselines == found[1].baselines


def test_the_interval_of_an_objective_and_data_of_ones_own_is_over_rows_whatever_the_batches_are():
    torch.manual_seed(2)
    rows = [{"input": torch.randn(3, dtype=torch.float64), "labels": torch.randn(2, dtype=torch.float64)} for _ in range(11)]
    network, task = torch.nn.Linear(3, 2).double(), Task(name="mine", train=rows, val=rows)

    def objective(logits, batch):
        return {"loss": (logits - batch["labels"]).square().sum(), "over": (logits > batch["labels"]).sum()}

    module = L.LightningDataModule()
    module.train_dataloader = module.val_dataloader = lambda: DataLoader([(*row.values(),) for row in rows], batch_size=4)
    found = [evaluate(network, task, objective=objective, batch_size=size).metrics for size in (1, 4, 64)]
    found.append(evaluate(network, module, objective=objective).metrics)
    losses = torch.stack([(network(row["input"]) - row["labels"]).square().sum() for row in rows]).detach()
    wanted = ratio_interval(losses, torch.full((11,), 2))
    for metrics in found:
        for name in ("value", "low", "high", "count"):
            assert getattr(metrics["loss"], name) == pytest.approx(getattr(wanted, name))
        assert metrics["over"].count == 22


def test_there_is_no_interval_where_rows_cannot_be_told_apart_or_there_is_one_row():
    rows = [{"input": torch.randn(3), "labels": torch.randn(2)} for _ in range(7)]

    class Flat(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input).flatten()

    def objective(logits, batch):
        return (logits.flatten() - batch["labels"].flatten()).square().sum()

    for network, val in ((Flat(3, 2), rows), (torch.nn.Linear(3, 2), rows[:1])):
        found = evaluate(network, Task(name="mine", train=rows, val=val), objective=objective)
        assert (found.metrics["loss"].low, found.metrics["loss"].high) == (None, None)
        assert found.metrics["loss"].count == 2 * len(val)
        assert " to " not in found.lines()[0] and json.loads(json.dumps(found.to_dict()))
    same = Evaluation({"loss": ratio_interval(torch.tensor([2.0, 4.0]), torch.tensor([1, 2]))})
    assert " to " not in same.lines()[0]  # rows that do not differ


def test_a_masked_model_without_knowledge_is_as_perplexed_as_its_vocabulary_is_large(ready):
    network, data = ready("masked_lm")
    network.head.requires_grad_(False).apply(lambda part: [torch.nn.init.zeros_(p) for p in part.parameters()])
    found = evaluate(network, data).metrics["masked_perplexity"]
    assert (found.value, found.low) == (pytest.approx(network.config.vocab_size), pytest.approx(found.high))


def test_answers_of_beams_too_end_where_a_table_of_positions_ends(ready):
    assert evaluate(*ready("short seq2seq"), EvaluationConfig(num_beams=2)).metrics["exact_match"].count > 9


def test_generated_answers_are_held_against_references_and_wrong_ones_are_shown_first(ready, monkeypatch):
    network, data = ready("seq2seq")
    given = [torch.tensor(data.tokenizer.encode(right).tolist()) for _, right in data.val_examples]
    given[5] = torch.tensor(data.tokenizer.encode("1066-10-14").tolist())
    left = iter(given)
    monkeypatch.setattr(evaluation, "generate", lambda model, input_ids, **options: [next(left) for _ in input_ids])
    found = evaluate(network, data, EvaluationConfig(num_shown=2))
    source, right = data.val_examples[5]
    assert found.metrics["exact_match"].value == pytest.approx(16 / 17)
    assert found.examples[0] == {"source": source, "answer": "1066-10-14", "right": right}
    assert found.examples[1]["answer"] == found.examples[1]["right"]
    answers = ["1066-10-14" if row == 5 else right for row, (_, right) in enumerate(data.val_examples)]
    for name, metric in {"chrf": CHRF(), "bleu": BLEU()}.items():
        wanted = metric.corpus_score(answers, [[right for _, right in data.val_examples]]).score
        assert found.metrics[name].value == pytest.approx(wanted, abs=1e-9)
        assert found.metrics[name].low < found.metrics[name].value < found.metrics[name].high
    assert found.baselines["chrf_of_copying"] < 60 and found.baselines["copy_exact_match"] == 0
    assert any("1066-10-14" in line for line in found.lines())
