"""Evaluation: intervals that are what they say, metrics by hand, and the same numbers however rows are batched."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from scipy import stats

from minitx.config import DatesDataConfig, EvaluationConfig, LanguagesDataConfig, MaskedDataConfig, RunConfig, TransformerConfig
from minitx.nn.models import build_model
from minitx.training import evaluation
from minitx.training.building import fit_model_config, open_data
from minitx.training.evaluation import evaluate, ratio_interval, share_interval

SMALL = {"embed_dim": 12, "num_heads": 3, "num_layers": 1, "init": "lecun"}
DATES = DatesDataConfig(locales=("en", "de"), train_size=53, val_size=17, batch_size=6)
LANGUAGES = LanguagesDataConfig(languages=("en", "de", "fi"), batch_size=16)
TASKS = {
    "seq2seq": (DATES, {"architecture": "encoder_decoder", "position": "rotary"}),
    "classify": (LANGUAGES, {"architecture": "encoder", "head": "sequence", "position": "rotary"}),
    "masked_lm": (MaskedDataConfig(path="text.txt", batch_size=4, context_len=11), {"architecture": "encoder"}),
}


@pytest.fixture
def ready(make_config, tmp_path: Path):
    """``ready("classify")`` gives a network fitted to opened data."""

    def build(task: str | None = None, **trainer):
        config: RunConfig = make_config(**{f"trainer__{name}": value for name, value in trainer.items()})
        if task is not None:
            data, model = TASKS[task]
            if isinstance(data, MaskedDataConfig):
                data = dataclasses.replace(data, path=str(tmp_path / "text.txt"))
            config = dataclasses.replace(config, data=data, model=TransformerConfig(**SMALL, **model))
        data = open_data(config)
        torch.manual_seed(3)
        return build_model(fit_model_config(config.model, data)).double(), data

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


def test_a_language_model_is_judged_in_bits_per_byte_and_character(ready):
    network, data = ready()
    found = evaluate(network, data)
    labels = data.val_source()
    total = count = 0.0
    for row in range(labels.num_rows):
        batch = labels.rows(range(row, row + 1))
        logits = network.eval()(batch["input_ids"]).detach()
        kept = batch["labels"] != -100
        total -= float(logits.log_softmax(-1)[kept].gather(1, batch["labels"][kept].unsqueeze(1)).sum())
        count += int(kept.sum())
    assert found.metrics["loss"].value == pytest.approx(total / count, rel=1e-12)
    assert found.metrics["loss"].count == count
    assert found.metrics["bits_per_character"].value == pytest.approx(total / count / math.log(2), rel=1e-12)
    assert set(found.baselines) >= {"xz_bits_per_character", "bzip2_bits_per_character"}


@pytest.mark.parametrize("task", [None, "classify", "seq2seq"])
def test_the_size_of_a_batch_changes_no_metric(ready, task):
    found = []
    for size in (3, 8):
        network, data = ready(task, val_batch_size=size)
        part = next(network.train().children()).eval()
        found.append(evaluate(network, data))
        assert (network.training, part.training) == (True, False)
    for name, metric in found[0].metrics.items():
        assert found[1].metrics[name].value == pytest.approx(metric.value, rel=1e-10), name
        assert found[1].metrics[name].count == metric.count
    assert found[0].baselines == found[1].baselines


def constant(network, said=None):
    """A network whose logits do not depend on its input: alike, or highest for class ``said``."""
    for parameter in network.head.parameters():
        torch.nn.init.zeros_(parameter)
    if said is not None:
        network.head.bias.data[said] = 1.0
    return network


def test_a_masked_model_without_knowledge_is_as_perplexed_as_its_vocabulary_is_large(ready):
    network, data = ready("masked_lm")
    found = evaluate(constant(network), data).metrics["masked_perplexity"]
    assert found.value == pytest.approx(network.config.vocab_size)
    assert found.low == pytest.approx(found.high)


def test_a_classifier_that_always_says_one_thing_scores_its_share(ready):
    network, data = ready("classify")
    labels = data.val_source().rows(range(data.val_source().num_rows))["labels"]
    found = evaluate(constant(network, said=1), data)
    assert found.metrics["accuracy"].value == pytest.approx(float((labels == 1).double().mean()))
    assert {"majority_accuracy", "bag_of_words_accuracy"} <= set(found.baselines)


def test_generated_answers_are_held_against_references_and_wrong_ones_are_shown_first(ready, monkeypatch):
    network, data = ready("seq2seq")
    references = [reference for _, reference in data.task.val_examples]
    given = list(references)
    given[5] = "1066-10-14"

    def told(model, input_ids, **options):
        rows, told.start = given[told.start : told.start + len(input_ids)], told.start + len(input_ids)
        return [torch.tensor(data.task.tokenizer.encode(row).tolist()) for row in rows]

    told.start = 0
    monkeypatch.setattr(evaluation, "generate", told)
    found = evaluate(network, data, EvaluationConfig(num_shown=2))
    assert found.metrics["exact_match"].value == pytest.approx(16 / 17)
    assert found.examples[0] == {"source": data.task.val_examples[5][0], "answer": "1066-10-14", "right": references[5]}
    assert found.examples[1]["answer"] == found.examples[1]["right"]
    assert 90 < found.metrics["chrf"].value < 100
    assert found.metrics["chrf"].low < found.metrics["chrf"].value < found.metrics["chrf"].high
    assert found.baselines["chrf_of_copying"] < 60
    assert any("1066-10-14" in line for line in found.lines())


def test_scores_of_texts_are_sacrebleus():
    references = ["the cat sat on the mat", "a dog ran over the hill today", "no one was there at all"]
    answers = ["the cat sat on a mat", "a dog ran over the hills today", "nothing"]
    for metric in evaluation._text_metrics().values():
        found = evaluation._corpus_score(metric, answers, references)
        assert found.value == pytest.approx(metric.corpus_score(answers, [references]).score, abs=1e-9)
        assert found.low <= found.value <= found.high
        assert found.low < found.high
