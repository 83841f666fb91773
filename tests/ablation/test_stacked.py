"""The run axis: each run of a stack is what the ordinary trainer makes of the same config."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from minitx.ablation import stacked
from minitx.ablation.grid import Cell, cells
from minitx.ablation.stackable import SERVED, stacks
from minitx.ablation.stacked import adamw, train_stack
from minitx.config import (
    AblationConfig,
    CallbacksConfig,
    ConfigError,
    InductionDataConfig,
    KeyValueDataConfig,
    ParameterRule,
    RunConfig,
    ScheduleConfig,
    StudyConfig,
    TextDataConfig,
    TrainerConfig,
    TransformerConfig,
)
from minitx.training.run import train

MODEL = TransformerConfig(
    embed_dim=12, num_heads=2, num_layers=1, ffn_dim=13, max_len=23, init="lecun", position="none", tie_embeddings=False
)
BASE = RunConfig(
    model=MODEL,
    data=KeyValueDataConfig(num_keys=11, num_values=5, num_pairs=7, batch_size=6, val_size=13),
    schedule=ScheduleConfig(warmup_steps=3),
    trainer=TrainerConfig(max_steps=11, accelerator="cpu", precision="64-true", val_every=0, ckpt_every=0, log_every=1),
    callbacks=CallbacksConfig(progress=False),
    on_nonfinite="record",
)
FOLD = ParameterRule(match="(q|k)_proj", lr="head_dim^-0.25", weight_decay="head_dim^0.25", eps="head_dim^0.25")
FULL_FOLD = {"model": {"scale": "unscaled", "init_fold": "symmetric"}, "optimizer": {"rules": (FOLD,)}}
FROZEN = ParameterRule(match="v_proj", trainable=False)
TWO_LAYERS = {"num_layers": 2, "position": "rotary", "num_heads": 1}
ARMS = {
    "inv_sqrt": {},
    "full_fold": FULL_FOLD,
    "decay and frozen values": {"optimizer": {"rules": (FOLD, FROZEN), "weight_decay": 0.1, "eps": 1e-3}},
    "qk_norm and learned scale": {"model": {"scale": "learned", "qk_norm": "rms"}},
    "softcap": {"model": {"scale": "unscaled", "softcap": 50.0}},
    "clipped, in part": {"optimizer": {"clip": 0.35}},
    "two layers": {"model": TWO_LAYERS, "data": InductionDataConfig(batch_size=6, val_size=13)},
    "a slope for every head": {"model": {"position": "alibi", "tie_embeddings": True}},
    "a log point now and then": {"trainer": {"log_every": 4, "val_batches": 2, "val_batch_size": 5}},
}


def config(seed=3, lr=1e-2, **changes):
    """``BASE`` with these keys of its groups."""
    data = {"data": changes.pop("data", BASE.data)}
    changes["optimizer"] = {"lr": lr, **changes.get("optimizer", {})}
    groups = {group: dataclasses.replace(getattr(BASE, group), **keys) for group, keys in changes.items()}
    return dataclasses.replace(BASE, seed=seed, **groups, **data)


def three_runs(**changes):
    return [config(seed, lr, **changes) for seed, lr in ((3, 1e-2), (5, 1e-2), (5, 1e-1))]


def assert_same_run(ours, theirs, tolerance=1e-9):
    """Every number of two results within ``tolerance``, everything else equal."""
    assert list(ours) == list(theirs)
    for key in theirs.keys() - {"loss_digest"}:
        a, b = ours[key], theirs[key]
        if isinstance(b, float | list) and b:
            a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}")
        else:
            assert a == b, key


@pytest.mark.parametrize("arm", ARMS)
def test_each_run_of_a_stack_is_the_one_of_the_ordinary_trainer(arm, tmp_path):
    configs = three_runs(**ARMS[arm])
    results = train_stack(configs)
    for i, (ours, run) in enumerate(zip(results, configs, strict=True)):
        assert_same_run(ours, train(run, tmp_path / str(i)))
    assert len({result["loss_digest"] for result in results}) == 3
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_a_stack_of_text_runs_knows_the_floors_and_the_words_of_a_language_model(tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.data.module.data_dir", lambda: tmp_path / "data")
    (tmp_path / "poem.txt").write_text("Once upon a midnight dreary, while I pondered, weak and weary,\n" * 9)
    data = TextDataConfig(name="text", path=str(tmp_path / "poem.txt"), batch_size=5, context_len=7)
    configs = three_runs(data=data, model={"position": "learned"})
    for i, (ours, run) in enumerate(zip(train_stack(configs), configs, strict=True)):
        theirs = train(run, tmp_path / str(i))
        assert_same_run(ours, theirs)
        assert set(ours["floors"]) == {"unigram", "bigram"}


def test_runs_of_one_stack_may_differ_in_everything_that_only_rates_and_starts_depend_on(tmp_path):
    configs = [
        config(optimizer={"weight_decay": 0.3, "eps": 1e-2}),
        config(seed=7, model={"init": "xavier"}, optimizer={"rules": (FOLD,), "clip": 0.2}),
        dataclasses.replace(config(), schedule=ScheduleConfig(name="trapezoid", warmup_steps=1)),
    ]
    for i, (ours, run) in enumerate(zip(train_stack(configs), configs, strict=True)):
        assert_same_run(ours, train(run, tmp_path / str(i)))


def test_the_order_of_the_runs_does_not_matter():
    configs = three_runs()
    assert train_stack(configs[::-1]) == train_stack(configs)[::-1]


@pytest.mark.parametrize("lr", [1e6, 1e200])
def test_a_run_that_diverges_leaves_the_others_alone(lr, tmp_path):
    calm = three_runs()
    wild = config(lr=lr)
    first, found, *others = train_stack([calm[0], wild, *calm[1:]])
    for ours, alone in zip([first, *others], train_stack(calm), strict=True):
        assert_same_run(ours, alone, tolerance=1e-12)
        assert ours["outcome"] != "NONFINITE"
    theirs = train(wild, tmp_path)
    assert (found["outcome"], found["nonfinite_step"]) == (theirs["outcome"], theirs["nonfinite_step"])
    assert (found["outcome"] == "NONFINITE") == (lr == 1e200)
    assert found["steps"] == theirs["steps"]


def test_a_run_that_is_not_finite_stops_at_the_step_of_the_ordinary_trainer(tmp_path):
    """Nothing is logged, validated or updated from that step on, be it the first one or a later one."""
    options = ((1e-2, 1e308), (1e200, 1.0))  # rate, factor of the scores
    configs = [config(lr=lr, model={"scale_factor": factor, "backend": "math"}) for lr, factor in options]
    for run, last in zip(configs, (0, 1), strict=True):
        (ours,) = train_stack([run])
        assert_same_run(ours, train(run, tmp_path / str(last)))
        assert (ours["outcome"], ours["nonfinite_step"], ours["steps"]) == ("NONFINITE", last + 1, last)
        assert ours["val_loss"] is None


def test_a_run_that_is_not_finite_keeps_the_weights_it_had(monkeypatch):
    """Those of the last update before: with a rate of 1e200 the first update is made and the second is not."""
    kept = {}
    validate = stacked.Stack.validate
    monkeypatch.setattr(stacked.Stack, "validate", lambda self, *rest: kept.update(w=self.weights) or validate(self, *rest))
    train_stack([config(), config(lr=1e200)])
    assert torch.isfinite(kept["w"]).all()
    assert [bool(row.abs().max() > 1e100) for row in kept["w"]] == [False, True]


def test_the_null_control_holds_bit_for_bit_in_a_stack():
    """At d_k = 16 the folds are powers of two, so no rounding tells the scaled arm from the folded one."""
    size = {"embed_dim": 32}
    scaled = train_stack(three_runs(model=size))
    folded = train_stack(three_runs(model={**size, **FULL_FOLD["model"]}, optimizer=FULL_FOLD["optimizer"]))
    unscaled = train_stack(three_runs(model={**size, "scale": "unscaled"}))
    assert [run["loss_digest"] for run in scaled] == [run["loss_digest"] for run in folded]
    assert not {run["loss_digest"] for run in scaled} & {run["loss_digest"] for run in unscaled}


def test_in_float32_a_stack_is_the_trainer_up_to_float32(tmp_path):
    (run,) = three_runs(trainer={"precision": "32-true", "max_steps": 5})[2:]
    (ours,) = train_stack([run])
    assert_same_run(ours, train(run, tmp_path), tolerance=1e-4)
    assert torch.get_default_dtype() == torch.float32


def test_every_row_has_its_own_rates_in_an_update():
    """Three updates of ``adamw`` on a matrix equal three of torch's optimizer on each row."""
    generator = torch.Generator().manual_seed(5)
    weights, *gradients = torch.randn(4, 2, 7, dtype=torch.float64, generator=generator)
    lr, decay, eps = torch.tensor([[0.1, 0.03], [0.2, 0.5], [1e-8, 0.7]], dtype=torch.float64).unsqueeze(-1)
    rates = {"lr": lr, "weight_decay": decay, "eps": eps}
    rows = [row.clone().requires_grad_() for row in weights]
    options = [{"lr": float(a), "weight_decay": float(b), "eps": float(c)} for a, b, c in zip(lr, decay, eps, strict=True)]
    theirs = [torch.optim.AdamW([row], betas=(0.8, 0.95), **own) for row, own in zip(rows, options, strict=True)]
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    for step, gradient in enumerate(gradients, start=1):
        weights, mean, square = adamw(weights, gradient, mean, square, step=step, betas=(0.8, 0.95), **rates)
        for row, optimizer, own in zip(rows, theirs, gradient, strict=True):
            row.grad = own
            optimizer.step()
    torch.testing.assert_close(weights, torch.stack(rows).detach(), rtol=1e-13, atol=1e-13)


REFUSED = {
    "on_nonfinite": "stop",
    "ckpt_path": "last.ckpt",
    "model.dropout": 0.1,
    "model.stochastic_depth": 0.1,
    "model.num_experts": 4,
    "model.pretrained": "folder",
    "objective.chunk_tokens": 7,
    "model.checkpointing": True,
    "model.attention": "linear",
    "optimizer.name": "muon",
    "model.backend": "sdpa",
    "callbacks.extra": {"sharp": {"_target_": "minitx.training.callbacks.AttentionTemperature"}},
    "evaluation.at_end": True,
    "evaluation.lengths": [9],
    "evaluation.attention_cost": True,
    "trainer.devices": 2,
    "trainer.strategy": "ddp",
    "trainer.precision": "bf16-mixed",
    "trainer.accumulate": 2,
    "trainer.compile": True,
    "trainer.deterministic": True,
    "trainer.val_every": 5,
}


@pytest.mark.parametrize("key", SERVED)
def test_what_no_stack_serves_is_refused_by_name(key):
    group, _, name = key.rpartition(".")
    value = {name: REFUSED[key]}
    wrong = dataclasses.replace(BASE, **({group: dataclasses.replace(getattr(BASE, group), **value)} if group else value))
    with pytest.raises(ConfigError, match=re.escape(f"{key}={REFUSED[key]} cannot be trained in a stack, which needs {key}=")):
        train_stack([BASE, wrong])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": {"scale": "unscaled"}}, "model.scale=inv_sqrt and unscaled"),
        ({"model": {"embed_dim": 16}}, "model.embed_dim=12 and 16"),
        ({"optimizer": {"betas": (0.9, 0.99)}}, r"optimizer.betas=[0.9, 0.95] and [0.9, 0.99]"),
        ({"trainer": {"max_steps": 12}}, "trainer.max_steps=11 and 12"),
        ({"data": InductionDataConfig(batch_size=6)}, "data.name=kv_lookup and induction"),
    ],
)
def test_runs_that_differ_in_more_are_refused_with_both_values(other, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        train_stack([config(), config(seed=4, **other)])


def test_runs_that_freeze_different_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.rules freeze other parameters in one run than in another"):
        train_stack([config(), config(optimizer={"rules": (FROZEN,)})])


def test_batches_of_different_lengths_are_refused(monkeypatch):
    class Ragged:
        def __init__(self, length):
            self.length = length

        def train_source(self):
            return self

        def __getitem__(self, address):
            return {"input_ids": torch.zeros(2, self.length)}

    with pytest.raises(ConfigError, match=r"data=kv_lookup: batches of two seeds differ in shape.*\(2, 3\).*\(2, 5\)"):
        next(stacked._batches([config(seed=0), config(seed=1)], {0: Ragged(3), 1: Ragged(5)}, torch.device("cpu")))


def test_a_stack_needs_a_run():
    with pytest.raises(ValueError, match="configs must hold at least one run, got none"):
        train_stack([])


def test_what_fails_leaves_the_default_dtype_alone(monkeypatch):
    def stumble(self, batch, step):
        assert torch.get_default_dtype() == torch.float64
        raise RuntimeError("no luck")

    monkeypatch.setattr(stacked.Stack, "update", stumble)
    with pytest.raises(RuntimeError, match="no luck"):
        train_stack([BASE])
    assert torch.get_default_dtype() == torch.float32


def study(**changes):
    factors = {"width": {"8": (), "32": ()}, "lr": {"low": (), "high": ()}}
    return StudyConfig(**{"base": ("trainer.max_steps=3",), "arms": ("a", "b"), "factors": factors, "seeds": (5, 3), **changes})


def test_a_stack_holds_the_seeds_and_rates_of_one_arm_under_one_condition_in_their_order():
    grid = AblationConfig(arms={"a": (), "b": ()}, studies={"main": study(tune_seeds=(8,)), "side": study(arms=("b",))})
    found = stacks(cells(grid))
    places = [(stack[0].study, stack[0].arm, stack[0].factors["width"]) for stack in found]
    assert len(found) == len(set(places)) == 2 * 2 + 2
    for stack in found:
        assert stacks(stack) == [stack]
        assert len({(cell.study, cell.arm, cell.factors["width"]) for cell in stack}) == 1
        seeds = (8, 5, 3) if stack[0].study == "main" else (5, 3)
        assert [(cell.seed, cell.factors["lr"]) for cell in stack] == [(s, lr) for s in seeds for lr in ("low", "high")]
    everything = sorted(cell.hash for cell in cells(grid))
    assert sorted(cell.hash for stack in found for cell in stack) == everything


@pytest.mark.parametrize("other", [{"arm": "b"}, {"study": "side"}, {"factors": {"lr": "1", "width": "8"}}])
def test_cells_of_two_arms_studies_or_conditions_are_no_stack(other):
    cell = Cell("main", "a", {"lr": "1", "width": "16"}, 0, ())
    same = [cell, dataclasses.replace(cell, seed=1), dataclasses.replace(cell, factors={"lr": "2", "width": "16"})]
    assert stacks(same) == [same]
    assert len(stacks([cell, dataclasses.replace(cell, **other)])) == 2


def test_no_cells_are_no_stack():
    assert stacks([]) == []


def test_a_rate_is_spread_over_its_parameter_only_where_rates_differ():
    sizes = torch.tensor([2, 3])
    assert stacked._spread([[0.1, 0.1], [0.2, 0.2]], sizes).shape == (2, 1)
    spread = stacked._spread([[0.1, 0.1], [0.2, 0.4]], sizes)
    assert torch.equal(spread, torch.tensor([[0.1] * 5, [0.2, 0.2, 0.4, 0.4, 0.4]]))
