"""Runs on the pretended accelerator (``tests/pretend.py``) equal runs on the CPU. Each pair runs in its own process."""

import copy
import dataclasses
import io
import json
import logging
import sys
from typing import NamedTuple

import lightning.pytorch as L
import pytest
import torch
from extra import Layered, last, train_with
from lightning.pytorch.callbacks import WeightAveraging
from ranks import run_ranks
from torch import nn
from torch.autograd import forward_ad

import minitx.data.token_cache
from minitx.ablation.design import ThresholdConfig
from minitx.ablation.thresholds import RateRuns
from minitx.cli import evaluate, export, generate, view
from minitx.cli.compose import compose_config
from minitx.cli.train import run_on_devices
from minitx.config import ConfigError, EvaluationConfig, TrainerConfig
from minitx.data.seeding import kept_generators, seed_device
from minitx.data.task import Task
from minitx.nn.efficient import LinearAttention, approximation_error
from minitx.nn.precision import widest_float
from minitx.nn.transfer import to_device, to_host
from minitx.training.checkpoints import move_to_device
from minitx.training.devices import check_count, device_name, memory_mb, peak_of, process_settings
from minitx.training.json_lines import read_json_lines
from minitx.training.metrics_csv import OF_THE_MACHINE, read_metrics
from minitx.training.module import TrainingModule
from minitx.training.trainer import device_arguments, quiet_lightning
from tests import pretend
from tests.test_configs import CONFIGS, OF_OWN_FILES, small_llama

pytestmark = pretend.is_needed
MATH = {"model__backend": "math"}  # fused attention on the CPU rounds differently
EMA = {"ema": {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.5}}


def on_both(scenario, folder, config, *arguments):
    """What ``scenario(config, folder, ...)`` returns on the CPU and on the device."""
    return run_ranks(1, _on_both, scenario, folder, config, arguments)[0]


def _on_both(scenario, folder, config, arguments):
    pretend.register()
    minitx.data.token_cache.data_dir = lambda: folder / "data"
    return scenario(config, folder / "cpu", *arguments), scenario(pretend.on_device(config), folder / "device", *arguments)


def content(folder):
    """What the files of a run hold, without what depends on the machine."""
    rows = read_metrics(folder / "metrics.csv")
    return {
        "metrics": [{name: value for name, value in row.items() if name not in OF_THE_MACHINE} for row in rows],
        **{name: read_json_lines(folder / f"{name}.jsonl") for name in ("probes", "samples")},
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".log"),
        "evaluation": [json.loads(path.read_text()) for path in folder.glob("evaluation.json")],
    }


# --- the device itself


def rules():
    device = pretend.register()
    x = torch.ones(3, device=device)
    for mixes in (lambda: x + torch.ones(3), lambda: torch.stack([x, torch.ones(3)]), lambda: nn.Linear(3, 2)(x)):
        with pytest.raises(RuntimeError, match="same device"):
            mixes()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=device, generator=torch.Generator())
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            copied = torch.ones(3, device=device).cpu()
        assert type(copied) is torch.Tensor and copied.device.type == "cpu"
        with mode():
            assert not x[None].is_inference()  # a view is of the kind of its base
    assert (x * torch.tensor(2.0))[torch.tensor([0])].device == device
    network = nn.Linear(3, 2).to(device)
    network(x).sum().backward()
    assert network.weight.grad.device == device and isinstance(network.weight, nn.Parameter)


def kinds(action):
    """The kinds of the waits of ``action``."""
    with pretend.waits() as counted:
        action()
    return sorted(kind for kind, _, _ in counted.elements())


class Named(NamedTuple):
    values: torch.Tensor
    step: int


def waiting_and_moving():
    device = pretend.register()
    x, pinned = torch.ones(3, device=device), torch.ones(3).pin_memory()
    assert kinds(lambda: (x * 2 + torch.tensor(1.0)).sum()) == []
    assert kinds(lambda: (float(x.sum()), x.tolist(), bool((x > 0).all()), x[x > 0])) == ["read"] * 4
    assert kinds(lambda: (x.cpu(), torch.zeros(3).copy_(x))) == ["down"] * 2
    assert kinds(lambda: (torch.tensor([1.0], device=device), torch.ones(3).to(device), pinned.to(device))) == ["up"] * 3
    assert kinds(lambda: pinned.to(device, non_blocking=True)) == []
    tree = {"loss": x.sum(), "ids": [torch.arange(5, device=device)[None], 3], "mask": x > 0, "wide": x.double()[::2]}
    tree |= {"half": (x / 3).bfloat16(), "none": x[:0], "named": Named(x, 3)}
    assert kinds(lambda: to_host(tree)) == ["down"]
    here = to_host(tree)
    assert type(here["named"]) is Named
    pairs = zip(*([*part.values(), *part["ids"], *part["named"]] for part in (tree, here)), strict=True)
    for there, value in pairs:
        if isinstance(there, torch.Tensor):
            assert value.device.type == "cpu" and value.dtype == there.dtype and value.equal(there.cpu())
    assert kinds(lambda: to_device(torch.ones(3), device)) == [] and to_device(torch.ones(3), device).device == device
    assert all(to_device(tensor, tensor.device) is tensor for tensor in (x, torch.ones(3)))

    network = nn.Linear(3, 2).to(device)
    twin = copy.deepcopy(network)
    assert twin.weight.device == device and torch.equal(twin.weight, network.weight) and twin.weight is not network.weight
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    for kind, options in {pretend.NAME: {}, "cpu": {"map_location": "cpu"}}.items():
        file.seek(0)
        assert torch.load(file, weights_only=True, **options)["weight"].device.type == kind
    assert network.to("cpu").weight.device.type == "cpu"

    with forward_ad.dual_level():  # torch makes tangents of zeros without memory
        dual = forward_ad.make_dual(x, x) * 3
        assert forward_ad.unpack_dual(dual.cpu()).tangent.tolist() == [3.0] * 3
    with torch.autocast(pretend.NAME, torch.bfloat16):  # CUDA's lists
        assert (x[None] @ x[:, None]).dtype == torch.bfloat16
        assert x.bfloat16().softmax(-1).dtype == torch.cat([x.bfloat16(), x]).dtype == torch.float32
    pretend.like_cuda()
    with pytest.raises(NotImplementedError, match="no kernel of CUDA"):
        torch.ones(2, 2, dtype=torch.long, device=device) @ torch.ones(2, 2, dtype=torch.long, device=device)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        x.cumsum(0)


def test_the_pretended_device_refuses_what_an_accelerator_refuses():
    run_ranks(1, rules)


def test_the_pretended_device_counts_waits_and_moves_what_an_accelerator_moves():
    run_ranks(1, waiting_and_moving)


def abilities():
    device = pretend.register()
    options = TrainerConfig(accelerator=pretend.NAME, precision="64-true")
    check_count(options)
    pretend.like_apple()
    assert widest_float(device) == torch.float32
    rows = torch.ones(1, 2, 5, 4, device=device)
    assert approximation_error(LinearAttention(), rows, rows, rows)["relative_error"] < 1e-6
    with pytest.raises(ConfigError, match=r"trainer\.precision=64-true: PRETEND does not support float64"):
        check_count(options)
    with pytest.raises(ConfigError, match=r"device=pretend cannot be used: pretend has no torch\.float64"):
        move_to_device(nn.Linear(2, 2).double(), pretend.NAME)
    with pytest.raises(ConfigError, match=r"trainer\.devices=2: this machine has 1 usable"):
        check_count(TrainerConfig(accelerator=pretend.NAME, devices=2))
    with pytest.raises(
        ConfigError, match=r"trainer\.accelerator=pretent is not allowed: .*mps, pretend \(did you mean pretend\?\)"
    ):
        check_count(TrainerConfig(accelerator="pretent"))
    assert (device_name(device), peak_of(device_name(device))) == ("PRETEND", None) and memory_mb(device) > 10
    where = device_arguments(TrainerConfig(accelerator=pretend.NAME, precision="bf16-mixed"))
    assert (where["strategy"].root_device, where["plugins"][-1].device) == (device, pretend.NAME)


def test_a_device_is_asked_what_it_can_do():
    run_ranks(1, abilities)


def of_a_plugin(folder):
    (folder / "a_plugin.py").write_text("from tests import pretend\n\npretend.register()\n")
    sys.path.insert(0, str(folder))
    words = ["data=kv_lookup", "data.batch_size=4", "imports=[a_plugin]", "trainer.accelerator=pretend", "trainer.devices=2"]
    with pytest.raises(ConfigError, match=r"trainer\.devices=2: this machine has 1 usable devices of pretend"):
        run_on_devices(compose_config(words), folder / "run")


def test_a_module_of_imports_registers_the_accelerator_of_several_processes(tmp_path):
    run_ranks(1, of_a_plugin, tmp_path)


# --- training and evaluation


class Watch(L.Callback):
    """Notes the network's device in each part of a run. ``is_small``: the device has memory for training, but not for evaluation."""

    def __init__(self, is_small=False):
        self.is_small, self.part, self.seen, self.pins = is_small, "fit", {}, False

    def setup(self, trainer, module, stage):
        if stage == "fit":
            self.hook = module.network.register_forward_pre_hook(self.look)
        self.part = stage

    def on_train_end(self, trainer, module):
        self.pins = trainer.train_dataloader.pin_memory
        for average in (each for each in trainer.callbacks if isinstance(each, WeightAveraging)):
            self.seen["average"] = {p.device.type for p in average._average_model.parameters()}

    def on_fit_end(self, trainer, module):
        self.part = "evaluation"

    def look(self, network, arguments):
        kind = next(network.parameters()).device.type
        self.seen.setdefault(self.part, set()).add(kind)
        if self.is_small and self.part == "evaluation" and kind != "cpu":
            raise torch.OutOfMemoryError("out of memory")

    def __deepcopy__(self, memo):
        return self  # of averaged weights, with the hook


def watched(config, folder, given, is_small):
    watch, said = Watch(is_small), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("minitx").addHandler(handler)
    result = train_with(config, folder, watch, **copy.deepcopy(given))
    logging.getLogger("minitx").removeHandler(handler)
    return content(folder), watch.seen, watch.pins, result["metrics"].get("test_loss"), "\n".join(said)


def run_on_both(folder, config, given=None, is_small=False):
    """What the files of both runs hold (they must be equal), and the devices and the log of the run on the device."""
    (on_cpu, _, _, test, _), (on_device, seen, pins, test_there, said) = on_both(watched, folder, config, given or {}, is_small)
    assert on_device == on_cpu and test_there == test and pins
    assert on_cpu["metrics"] and on_cpu["evaluation"]
    return on_cpu, seen, said


def test_a_run_has_the_numbers_of_the_cpu_and_is_evaluated_on_its_device(make_config, tmp_path):
    changes = {
        **MATH,
        "model__dropout": 0.2,
        "probe__every": 3,
        "probe__weights_every": 3,
        "probe__weights_rows": 3,
        "samples__every": 3,
        "samples__max_new_tokens": 3,
    }
    config = make_config(**changes, trainer__val_every=3, trainer__ckpt_every=3)
    config = dataclasses.replace(config, evaluation=EvaluationConfig(at_end=True, num_rows=5))
    found, seen, _ = run_on_both(tmp_path, config)
    assert seen == {"fit": {pretend.NAME}, "evaluation": {pretend.NAME}}
    assert {"probes.jsonl", "samples.jsonl", "attention/step_00000003.safetensors", "checkpoints/best.ckpt"} <= {
        *found["files"]
    }


@pytest.mark.slow
def test_averaged_weights_are_evaluated_on_the_device_and_the_best_are_tested_there(make_config, tmp_path):
    rows = [{"input_ids": torch.tensor([i % 7, i % 3]), "labels": torch.tensor([i % 5, i % 2])} for i in range(8)]
    config = make_config(trainer__ckpt_every=2, trainer__val_every=2, callbacks=EMA)
    config = dataclasses.replace(config, evaluation=EvaluationConfig(at_end=True, test="best"))
    weighted = nn.CrossEntropyLoss(weight=torch.arange(1.0, 8.0), reduction="sum")  # has a tensor on the device
    given = {"model": Layered(7), "data": Task(name="mine", train=rows, val=rows, test=rows), "objective": weighted}
    _, seen, _ = run_on_both(tmp_path, config, {**given, "batch_size": 4})
    assert seen == {part: {pretend.NAME} for part in ("fit", "average", "evaluation", "test")}


@pytest.mark.slow
def test_a_model_that_does_not_fit_on_its_device_to_be_evaluated_is_evaluated_on_the_cpu(make_config, tmp_path):
    config = dataclasses.replace(
        make_config(**MATH, trainer__max_steps=2), evaluation=EvaluationConfig(at_end=True, num_rows=5)
    )
    _, seen, said = run_on_both(tmp_path, config, is_small=True)
    assert seen["evaluation"] == {pretend.NAME, "cpu"} and "pretend:0 has too little memory" in said


@pytest.mark.slow
def test_answers_are_generated_on_the_device(make_config, tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in ("ab", "abc", "bca", "cab", "bb", "ca")))
    data = {"_target_": "minitx.data.pairs", "path": str(tmp_path / "pairs.tsv"), "tokenizer": "char", "batch_size": 2}
    config = make_config(**MATH, model__max_len=128, model__architecture="encoder_decoder", trainer__max_steps=3)
    config = dataclasses.replace(config, data=data, evaluation=EvaluationConfig(at_end=True, num_beams=2))
    found, seen, _ = run_on_both(tmp_path, config)
    assert seen["evaluation"] == {pretend.NAME} and found["evaluation"][0]["examples"]


def without_float64(config, folder):
    if config.trainer.accelerator == pretend.NAME:
        pretend.like_apple()
    train_with(config, folder)
    found = content(folder)
    return found["metrics"], found["probes"], found["evaluation"][0]["metrics"]


@pytest.mark.slow
def test_a_device_without_float64_trains_probes_and_evaluates(make_config, tmp_path):
    config = make_config(**MATH, probe__every=4, trainer__max_steps=4)
    config = dataclasses.replace(config, evaluation=EvaluationConfig(at_end=True, num_rows=5))
    (metrics, probes, evaluation), (metrics_there, probes_there, evaluation_there) = on_both(without_float64, tmp_path, config)
    near = {"rel": 1e-5, "abs": 1e-6}
    assert [row["val_loss"] for row in metrics_there if row["val_loss"]] == [pytest.approx(metrics[-1]["val_loss"], **near)]
    assert evaluation_there["loss"].pop("unit") == evaluation["loss"].pop("unit")
    assert evaluation_there["loss"] == pytest.approx(evaluation["loss"], **near)
    for record, there in zip(probes, probes_there, strict=True):
        for layer, layer_there in zip(record["layers"], there["layers"], strict=True):
            for name in ("entropy", "logit_std", "token_cosine", "grad_query_rms", "key_norm"):
                assert layer_there[name] == pytest.approx(layer[name], **near), name


# --- every experiment, every direction, every program

FEW = [
    "debug=one_step",
    "trainer.max_steps=3",
    "trainer.val_every=3",
    "trainer.log_every=1",
    "trainer.rehearse=false",
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "trainer.val_batch_size=4",
    "data.batch_size=4",
    "callbacks.progress=false",
]
SMALLER = {"gpt2_baseline": ["model.num_layers=2", "model.embed_dim=48", "model.num_heads=2"]}
# scaling_ablation names a grid alone, whose cells are experiments of their own
NAMES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml") if path.stem != "scaling_ablation")
EXPERIMENTS = [name if name == "kv_lookup" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def of_experiment(config, folder):
    """Losses, gradient norms and metrics of a run."""
    if config.trainer.accelerator == pretend.NAME:
        pretend.like_cuda()
    result = train_with(config, folder)
    rows = read_metrics(folder / "metrics.csv")
    names = ("train_loss", "val_loss", "grad_norm", "lr", "tokens")
    metrics = {name: value for name, value in result["metrics"].items() if name not in OF_THE_MACHINE}
    return [[row[name] for name in names] for row in rows], metrics


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_the_numbers_of_the_cpu(name, tmp_path):
    words = [f"experiment={name}", *FEW, *SMALLER.get(name, ())]
    if name in ("finetune", "scaling_cell_real"):
        words.append(f"{'model' if name == 'scaling_cell_real' else 'init_from'}.path={small_llama(tmp_path / 'llama')}")
    if name in (*OF_OWN_FILES, "finetune"):
        (tmp_path / "own.tsv").write_text("text\tlabel\n" + "".join(f"word {n}\t{n % 3}\n" for n in range(211)))
        words.append(f"data.path={tmp_path / 'own.tsv'}")
    (rows, metrics), (rows_there, metrics_there) = on_both(of_experiment, tmp_path, compose_config(words))
    assert len(rows_there) == len(rows) >= 3
    for row, there in zip(rows, rows_there, strict=True):
        assert there == [value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6) for value in row]
    assert metrics_there == pytest.approx(metrics, rel=1e-4)


def resumed_elsewhere(config, folder):
    """The losses of a run, and of one that is resumed on the other device."""
    there = dataclasses.replace(pretend.on_device(config) if config.trainer.accelerator == "cpu" else config, ckpt_path="last")
    here = dataclasses.replace(config.trainer, accelerator="cpu")
    there = there if config.trainer.accelerator == "cpu" else dataclasses.replace(config, trainer=here, ckpt_path="last")
    train_with(config, folder / "whole")
    with pytest.raises(ArithmeticError):
        train_with(config, folder / "moved", Fails())
    train_with(there, folder / "moved")
    states = {name: last(folder / name)["state_dict"] for name in ("whole", "moved")}
    weights = {name: {key: weight.tolist() for key, weight in state.items()} for name, state in states.items()}
    return [(content(folder / name)["metrics"], weights[name]) for name in states]


def test_a_run_is_resumed_on_the_other_device_with_the_same_numbers(make_config, tmp_path):
    config = make_config(**MATH, model__dropout=0.4, trainer__ckpt_every=3, callbacks=EMA)
    for (rows, weights), (rows_there, weights_there) in on_both(resumed_elsewhere, tmp_path, config):
        assert rows_there == rows and len(rows) == 6
        assert weights_there == weights and weights


def programs(config, folder):
    """What the programs print and write for a checkpoint, with the model on the device of the run."""
    folder = folder / "run"
    train_with(config, folder)
    device, path = config.trainer.accelerator, f"ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    printed, out = {}, sys.stdout
    commands = {
        "evaluate": (evaluate, f"device={device}", "num_rows=5"),
        "greedy": (generate, f"device={device}", "prompt=Once", "max_new_tokens=5"),
        "sampled": (generate, f"device={device}", "prompt=Once", "max_new_tokens=5", "temperature=0.7", "top_k=5"),
        "beams": (generate, f"device={device}", "prompt=Once", "max_new_tokens=5", "num_beams=3"),
        "view": (view, f"device={device}", "text=Once upon", f"output={folder / 'page.html'}"),
        "export": (export, f"output={folder / 'exported'}"),
    }
    for name, (program, *words) in commands.items():
        sys.argv, sys.stdout = [f"{name}.py", path, *words], io.StringIO()
        code = program.main()
        printed[name], sys.stdout = sys.stdout.getvalue().replace(str(folder), "FOLDER"), out
        assert code == 0, name
    page = (folder / "page.html").read_text().replace(str(folder), "FOLDER").replace(f"device={device}", "")
    return printed, page, (folder / "exported" / "model.safetensors").read_bytes()


def test_the_programs_write_on_the_device_what_they_write_on_the_cpu(make_config, tmp_path):
    config = make_config(**MATH, trainer__ckpt_every=3)
    here, there = on_both(programs, tmp_path, config)
    assert there == here


# --- seeds


class Fails(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4:
            raise ArithmeticError("in the middle")


def resumed(config, folder):
    train_with(config, folder / "whole")
    with pytest.raises(ArithmeticError):
        train_with(config, folder / "stopped", Fails())
    torch.manual_seed(99)
    assert last(folder / "stopped")["global_step"] == 3
    train_with(dataclasses.replace(config, ckpt_path="last"), folder / "stopped")
    return [content(folder / name)["metrics"] for name in ("whole", "stopped")]


@pytest.mark.slow
def test_a_run_that_was_stopped_draws_on_the_device_what_the_whole_run_draws(make_config, tmp_path):
    config = make_config(**MATH, model__dropout=0.4, trainer__ckpt_every=3)
    for whole, stopped in on_both(resumed, tmp_path, config):
        assert stopped == whole and len(whole) == 6


def seeds():
    device = pretend.register()

    def draw(seed):
        seed_device(seed, device)
        return torch.rand(4, device=device).tolist(), torch.rand(4).tolist()

    assert draw(1) == draw(1) != draw(2)
    before = torch.get_device_module(device).get_rng_state()
    with kept_generators(device):
        draw(3)
    assert torch.get_device_module(device).get_rng_state().equal(before)


def test_the_generator_of_any_device_is_seeded_and_restored():
    run_ranks(1, seeds)


# --- the start of a threshold


def starting_loss(config, folder):
    kinds, sums = [], TrainingModule.sums
    TrainingModule.sums = lambda self, batch: kinds.append(self.device.type) or sums(self, batch)
    rule = ThresholdConfig(first={"plain": 0.1}, metric="train_loss", value=0.3, window=2)
    folder.mkdir()
    with quiet_lightning(), process_settings(config.trainer):
        runs = RateRuns(config, folder, rule)
        at_start = {*kinds}
        record = runs.run(0.01)
    TrainingModule.sums = sums
    return runs.start, record, at_start


def test_the_starting_loss_of_a_threshold_is_computed_on_the_device(make_config, tmp_path):
    config = make_config(**MATH, trainer__max_steps=2, optimizer={"_target_": "minitx.training.optimizers.adamw", "lr": 0.1})
    (start, record, on_cpu), (start_there, record_there, on_device) = on_both(starting_loss, tmp_path, config)
    assert (on_cpu, on_device) == ({"cpu"}, {pretend.NAME})
    assert start_there == start > 0 and record_there == record


# --- steps whose update was skipped


class Poison(L.Callback):
    """Makes the loss of the fourth step NaN. The next ones are finite again."""

    def on_fit_start(self, trainer, module):
        is_bad = lambda network: network.training and trainer.global_step == 3  # noqa: E731
        module.network.register_forward_hook(lambda network, _, out: out * torch.nan if is_bad(network) else out)

    def __deepcopy__(self, memo):
        return self


def poisoned(configs, folder):
    found = []
    for number, config in enumerate(configs):
        result = train_with(config, folder / str(number), Poison())
        weights = {name: value.tolist() for name, value in last(folder / str(number))["state_dict"].items()}
        found.append((content(folder / str(number)), result["nonfinite_step"], result["steps"], weights))
    return found


def _poisoned_on_both(folder, configs):
    pretend.register()
    minitx.data.token_cache.data_dir = lambda: folder / "data"
    return poisoned(configs, folder / "cpu"), poisoned([*map(pretend.on_device, configs)], folder / "device")


@pytest.mark.slow
def test_nothing_is_written_of_a_step_whose_update_was_skipped(make_config, tmp_path):
    """On the CPU the run ends at the first bad step; on the device the host learns of it later."""
    writers = {
        "probes": {"probe__every": 1, "probe__weights_every": 1, "probe__weights_rows": 3},
        "samples": {"samples__every": 2, "samples__max_new_tokens": 2},
        "validation": {"trainer__val_every": 2},
        "checkpoints": {"trainer__ckpt_every": 1},
        "rows alone": {},
    }
    plain = {**MATH, "trainer__max_steps": 8, "trainer__log_every": 10, "trainer__ckpt_every": 3, "callbacks": EMA}
    configs = [make_config(on_nonfinite="record", **{**plain, **changes}) for changes in writers.values()]
    on_cpu, on_device = run_ranks(1, _poisoned_on_both, tmp_path, configs)[0]
    for name, expected, found in zip(writers, on_cpu, on_device, strict=True):
        assert found == expected and expected[1:3] == (4, 3), name
    assert [record["step"] for record in on_cpu[0][0]["probes"]] == [0, 1, 2, 3]
