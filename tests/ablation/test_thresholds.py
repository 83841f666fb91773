"""The search for the largest stable rate, on simulated data of a known truth, and one that trains."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pretended_runs import SMALL, from_start
from torch import nn

from minitx.ablation import thresholds
from minitx.ablation.design import AblationConfig, StudyConfig, ThresholdConfig
from minitx.ablation.execution import CellJob
from minitx.ablation.grid import cells
from minitx.ablation.scaling.updates import MultiplyMatrices, lion, muon, relative_adam
from minitx.ablation.thresholds import Bracket, Watch, measure_threshold, search
from minitx.cli.ablate import run_cell
from minitx.cli.compose import compose_config
from minitx.config import ConfigError, ParameterRule, TransformerConfig
from minitx.data.tokenizer import train_tokenizer
from minitx.interop import save_hf
from minitx.nn import DecoderLM
from minitx.training.trainer import build_trainer

TEXT = "In the beginning was the Word, and the Word was with God, and the Word was God. " * 40


# --- the search


def test_a_line_that_a_crash_cut_short_costs_its_run_alone(tmp_path, monkeypatch):
    tried = []

    class Pretended:
        start, config, network = 0.0, SimpleNamespace(trainer=SimpleNamespace(max_steps=3)), nn.Linear(2, 2)

        def __init__(self, *_):
            pass

        def run(self, rate):
            tried.append(rate)
            return {"rate": rate, "stable": rate < 3}

    monkeypatch.setattr(thresholds, "RateRuns", Pretended)
    config = SimpleNamespace(trainer=SimpleNamespace(threads=1), optimizer={"lr": 1.0})
    monkeypatch.setattr(thresholds, "process_settings", lambda trainer: contextlib.nullcontext())
    (tmp_path / "runs.jsonl").write_text('{"rate": 1.0, "stable": true}\n{"rate": 2.0, "stable": tr')
    for wanted in ([2.0, 4.0, 8.0], []):
        tried.clear()
        measure_threshold(config, tmp_path, SimpleNamespace(bisections=0))
        assert tried == wanted


@pytest.mark.parametrize("true", [0.00071, 0.0099, 0.01, 0.0101, 0.3, 40.0])
@pytest.mark.parametrize("bisections", [0, 3, 4])
def test_the_bracket_holds_the_true_limit_and_is_as_narrow_as_promised(true, bisections):
    asked = []
    found = search(lambda rate: asked.append(rate) or rate <= true, 0.01, bisections)
    assert found.low <= true < found.high and found.above == [] and {found.low, found.high} <= {*asked}
    assert found.high / found.low == pytest.approx(2.0**2.0**-bisections, rel=1e-4)
    assert len(asked) == len(set(asked)) <= 3 + bisections + abs(math.log2(true / 0.01))


def test_a_second_crossing_above_the_bracket_is_noted():
    assert search(lambda rate: rate < 1.5 or 3.0 < rate < 4.5, 1.0, 0) == Bracket(1.0, 2.0, [4.0])
    assert search(lambda rate: rate < 1.5 or rate > 5.0, 1.0, 0).above == []  # further up nothing is tried


@pytest.mark.parametrize(("answer", "message"), [(True, "is stable"), (False, "is not stable")])
def test_a_limit_that_is_nowhere_is_an_error(answer, message):
    with pytest.raises(ArithmeticError, match=message):
        search(lambda rate: answer, 1.0, 2)


# --- when a run fails


LOSS = {"metric": "train_loss", "value": 0.3, "window": 2}
LOWEST = {**LOSS, "above": "minimum"}


@pytest.mark.parametrize(("rule", "curve", "ended", "worst"), [
    ({}, [0.0, *[1.0] * 7, *[0.9] * 9], 8, 0.875),
    ({}, [0.9] * 16, None, 0.9),
    ({}, [*[1.0] * 10, *[0.5] * 10], 12, 0.875),
    (LOSS, [9.0, 1.2, 1.2, 1.2], 2, 5.1),
    (LOSS, [1.2, 1.3, 1.3, 1.3], None, 1.3),
    (LOSS, [1.0, 1.0, 1.5, 1.5], 4, 1.5),
    (LOSS, [1.0, math.nan], 2, math.nan),
    (LOWEST, [1.0, 0.6, 0.6, 0.4, 0.4, 0.9, 0.9], 7, 0.5),  # below the start all along
    (LOWEST, [1.0, 0.6, 0.4, 0.4, 0.6, 0.6], None, 0.2),
    (LOWEST, [1.3, 1.4], 2, 0.35),  # the start counts
    (LOWEST, [1.0, math.nan], 2, math.nan),
])  # fmt: skip
def test_a_run_fails_at_the_first_window_below_its_accuracy_or_above_the_start_or_the_lowest_loss(
    rule, curve, ended, worst, monkeypatch
):
    watch, trainer = Watch(ThresholdConfig(first={"arm": 1.0}, **rule), start=1.0), SimpleNamespace(should_stop=False)
    for step, value in enumerate(curve, 1):
        means = {"train_loss": value} if rule else {"train_loss": 0.0, "train_accuracy": value}
        monkeypatch.setattr(thresholds, "step_means", lambda *_, means=means: means)
        watch.on_step(trainer, None, step, None)
        if trainer.should_stop:
            break
    assert (step if watch.failed else None) == ended and trainer.should_stop == watch.failed
    assert watch.worst == pytest.approx(worst, nan_ok=True)


def test_accuracy_that_nobody_counts_is_refused(monkeypatch):
    monkeypatch.setattr(thresholds, "step_means", lambda *_: {"train_loss": 1.0})
    with pytest.raises(ConfigError, match="does not count correct answers"):
        Watch(ThresholdConfig(first={"arm": 1.0}), math.nan).on_step(None, None, 1, None)


# --- optimizers of the grid


def test_lion_takes_steps_of_one_size_in_the_direction_of_the_sign():
    weight = nn.Linear(3, 2, bias=False)
    before, optimizer = weight.weight.detach().clone(), lion(weight, lr=0.1)
    mean = torch.zeros_like(before)
    for gradient in (torch.randn(2, 3), torch.randn(2, 3) * 100):
        weight.weight.grad = gradient
        optimizer.step()
        before -= 0.1 * (0.9 * mean + 0.1 * gradient).sign()
        mean = 0.99 * mean + 0.01 * gradient
        torch.testing.assert_close(weight.weight.detach(), before)


def test_relative_steps_are_adams_times_the_size_of_the_weights():
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    other.load_state_dict(one.state_dict())
    relative, plain = relative_adam(one, lr=0.01), torch.optim.Adam(other.parameters(), lr=0.01, betas=(0.9, 0.95))
    for _ in range(3):
        before = other.weight.detach().clone()
        one.load_state_dict(other.state_dict())
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            a.grad = b.grad = torch.randn_like(b)
        relative.step(), plain.step()
        step = (other.weight - before) * before.square().mean().sqrt()
        torch.testing.assert_close(one.weight - before, step, rtol=1e-4, atol=1e-7)


def test_one_rate_moves_both_parts_of_muon():
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = muon(network, lr=0.1, rules=(ParameterRule(match="0.weight", lr=0.5),)).param_groups
    assert sorted({group["lr"] for group in groups}) == pytest.approx([0.02, 0.05])


def test_matrices_are_multiplied_once_and_vectors_stay():
    network = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for step in (0, 5):  # a run that goes on has the factor in its checkpoint
        MultiplyMatrices(3.0).on_train_start(SimpleNamespace(global_step=step), SimpleNamespace(network=network))
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name] * (3.0 if parameter.dim() > 1 else 1.0))


# --- one that trains


def further(first, *words):
    return [*SMALL, "trainer.max_steps=6", "seed=1003", *words, *from_start(first)]


FOLD = "+callbacks.fold={_target_: minitx.ablation.scaling.updates.FoldIntoQueries}"
RULE = ThresholdConfig(first={"arm": 0.01}, metric="train_loss", value=1.0, window=3, bisections=1)


@pytest.mark.parametrize(("rate", "words"), [  # an octave below the highest that is stable, or less
    (0.04, ["model.scale=unscaled"]),
    pytest.param(
        2.56,
        ["model.scale=inv_sqrt", "optimizer=sgd", "optimizer.rules=[{match: '(q|k)_proj'}, {match: '', trainable: false}]"],
        marks=pytest.mark.slow,
    ),
    pytest.param(0.04, ["model.scale=unscaled", FOLD], marks=pytest.mark.slow),
])  # fmt: skip
def test_every_run_of_a_threshold_is_the_run_of_train_py(tmp_path, first, words, rate):
    config = compose_config([*further(first, *words), f"optimizer.lr={rate}"])
    found = measure_threshold(config, tmp_path / "threshold", RULE)
    assert 0.0 <= found["start_error"] < 1e-5 and found["low"] < found["high"]
    assert {run["rate"]: run["stable"] for run in found["runs"]}.items() >= {found["low"]: True, found["high"]: False}.items()
    for run in found["runs"]:
        alone = run_cell(CellJob([*further(first, *words), f"optimizer.lr={run['rate']:g}"], tmp_path / "run", 6))
        assert run["loss"] == alone["loss"][: len(run["loss"])] and run["nonfinite_step"] == alone["nonfinite_step"]
        assert run["accuracy"] == alone["accuracy"][: len(run["loss"])]


@pytest.mark.slow
def test_weights_of_hugging_face_are_folded_and_the_start_is_checked(tmp_path):
    """As in a grid on a pretrained model: no study made the weights."""
    tokenizer = train_tokenizer("bpe", [TEXT], vocab_size=300)
    shape = {"embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 64, "activation": "gelu_tanh"}
    save_hf(DecoderLM(TransformerConfig(vocab_size=tokenizer.vocab_size, **shape)), tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs" / "tokenizer.json")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    base = ["experiment=finetune", f"init_from.path={tmp_path / 'theirs'}", f"data.path={tmp_path / 'text.txt'}", "data.context_len=32",
            "data.batch_size=2", "trainer.max_steps=4", "schedule=constant", "schedule.warmup_steps=0", "init_from.fold_scale=true",
            "trainer.accelerator=cpu", "trainer.threads=1"]  # fmt: skip
    rule = replace(RULE, first={"inv_sqrt": 0.1, "unscaled": 0.1})
    study = StudyConfig(base=tuple(base), arms=("inv_sqrt", "unscaled"), threshold=rule)
    arms = {name: (f"model.scale={name}",) for name in study.arms}
    for cell in cells(AblationConfig(arms=arms, studies={"text": study})):
        found = run_cell(CellJob(cell.words(tmp_path), tmp_path / cell.hash, 4, threshold=cell.threshold))
        assert found["start_error"] < 1e-5 and found["start"] == pytest.approx(math.log(tokenizer.vocab_size), rel=0.1)
        assert found["low"] < found["high"] and not (tmp_path / cell.hash).exists()


def test_a_run_leaves_no_moments_of_its_optimizer_behind(tmp_path, first, monkeypatch):
    """Ten runs of one search on a model of 500 MB would hold ten times its moments."""
    trainers = []
    monkeypatch.setattr(thresholds, "build_trainer", lambda *given: trainers.append(build_trainer(*given)) or trainers[-1])
    config = compose_config([*further(first), "optimizer.lr=0.01"])
    found = measure_threshold(config, tmp_path, RULE)
    assert sum(bool(trainer.optimizers) for trainer in trainers) == len(found["runs"])
    assert not any(optimizer.state for trainer in trainers for optimizer in trainer.optimizers)


def test_a_threshold_that_was_stopped_goes_on_with_the_runs_it_has(tmp_path, first, monkeypatch):
    config, run, made = compose_config([*further(first), "optimizer.lr=0.01"]), thresholds.RateRuns.run, []
    whole = measure_threshold(config, tmp_path / "whole", RULE)

    def stops(self, rate):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(rate)
        return run(self, rate)

    monkeypatch.setattr(thresholds.RateRuns, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        measure_threshold(config, tmp_path / "stopped", RULE)
    monkeypatch.setattr(thresholds.RateRuns, "run", lambda self, rate: made.append(rate) or run(self, rate))
    assert measure_threshold(config, tmp_path / "stopped", RULE) == whole
    assert sorted(made) == [run["rate"] for run in whole["runs"]]


def test_the_fold_in_w_q_alone_needs_a_model_without_the_scale(tmp_path, first):
    words = further(first, "model.scale=inv_sqrt", FOLD)
    with pytest.raises(ConfigError, match=r"needs model\.scale=unscaled"):
        run_cell(CellJob(words, tmp_path / "run", 6))
