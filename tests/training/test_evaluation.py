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
from minitx.data.datamodule import DataModule, open_data
from minitx.data.splits import as_split
from minitx.data.task import Task
from minitx.nn import build_model
from minitx.training import evaluation
from minitx.training.evaluation import Evaluation, evaluate, objective_on, ratio_interval, share_interval
from minitx.training.network_building import network_of

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
        data = open_data(config.data, config.trainer, seed=config.seed)
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


def test_a_score_counts_every_pair_and_says_of_how_many_rows_it_is(make_config, tmp_path, monkeypatch):
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{n}\t{'ab' * (n % 5 + 1)}" for n in range(67)))
    long = {n: ("1" * 19 if n == 3 else str(n), "ab" * (9 if n in (3, 5) else 2)) for n in range(11)} | {11: (" ", "a")}
    (tmp_path / "val.tsv").write_text("\n".join(f"{source}\t{target}" for source, target in long.values()))
    paths = {"path": str(tmp_path / "pairs.tsv"), "val_path": str(tmp_path / "val.tsv")}
    model = node(build_model, **SMALL, architecture="encoder_decoder", position="learned", max_len=12)
    config = dataclasses.replace(make_config(), data={**PAIRS, **paths}, model=model)
    data = open_data(config.data, config.trainer, seed=config.seed)
    network, task, asked = network_of(config.model, data).double(), data.task, list[list[int]]()
    right = iter([torch.tensor(task.tokenizer.encode(target).tolist()) for _, target in task.val_examples] * 2)
    monkeypatch.setattr(
        evaluation, "generate", lambda model, ids, **options: asked.extend(ids.tolist()) or [next(right) for _ in ids]
    )
    found, few = evaluate(network, task, batch_size=4), evaluate(network, task, EvaluationConfig(num_rows=5))
    assert asked[3][:12] == task.tokenizer.encode("1" * 12).tolist(), "a long source is cut at data.max_source_len"
    assert found.metrics["exact_match"] == share_interval(11, 11), "and its answer is compared with all of the target"
    said = ["1 of 12 pairs are left out: a side is blank"]
    said.append("2 of 11 pairs are cut: they are longer than data.max_source_len=12 and data.max_target_len=12 allow")
    assert (found.rows, found.of_rows, found.left_out) == (11, 11, said)
    assert (few.rows, few.of_rows) == (5, 11)
    for each, rows in ((found, "11"), (few, "5 of 11")):
        assert f"{'rows':{len('copy_exact_match')}}  {rows}" in each.lines() and all(
            any(line.strip() == one for line in each.lines()) for one in said
        )
        assert {"rows": each.rows, "of_rows": 11, "left_out": said}.items() <= json.loads(json.dumps(each.to_dict())).items()


@pytest.mark.parametrize(("kind", "unit"), [("classify", "2 rows"), ("tag", "4 labels"), ("other", "4 labels")])
def test_rows_without_a_label_that_counts_are_no_rows_of_the_score_of_classes(kind, unit):
    labels = [torch.tensor(row) for row in ([1, 2], [0, -100], [-100, -100], [1, -100])]
    rows = [{"input": torch.eye(3)[:2], "labels": row if kind != "classify" else row[1]} for row in labels]
    rows[0]["labels"], rows[1]["labels"] = (rows[0]["labels"], rows[1]["labels"]) if kind != "classify" else (1, 2)
    network = torch.nn.Identity() if kind != "classify" else torch.nn.Flatten()
    found = evaluate(network, Task(name="mine", kind=kind, train=rows, val=rows), batch_size=2)
    assert any(line.startswith("accuracy") and unit in line for line in found.lines())
    assert (found.rows, found.of_rows) == ((2, 4) if kind == "classify" else (4, 4))
    assert found.left_out == (["2 of 4 rows are left out: none of their labels counts"] if kind == "classify" else [])


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


def test_each_tensor_of_an_objective_returns_to_its_own_device():
    objective = torch.nn.BatchNorm1d(3).to("meta")
    objective.weight = torch.nn.Parameter(torch.arange(3.0))
    before = dict(objective.state_dict(keep_vars=True))
    with objective_on(torch.device("meta"), objective):
        assert {tensor.device.type for tensor in objective.state_dict().values()} == {"meta"}
    after = objective.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert after["weight"].tolist() == [0, 1, 2] and after["bias"].is_meta
