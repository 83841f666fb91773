"""The plan of a run is what its processes hold: alone, in two processes, and as one of 64 of which 63 do not exist."""

import dataclasses
import os
from collections import Counter

import lightning.pytorch as L
import pytest
import torch
from extra import Layered, train_with
from lightning.pytorch.callbacks import WeightAveraging
from ranks import environment, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import minitx.training.memory_plan as plan_module
import minitx.training.trainer as trainer_module
from minitx.cli.compose import compose_config
from minitx.config import ConfigError, InitFrom, node
from minitx.data.datamodule import open_data
from minitx.data.task import Task
from minitx.training import optimizers
from minitx.training.memory_plan import build_without_numbers, fake_processes, show_plan
from minitx.training.run import train
from minitx.training.sharding import layers_to_shard, parallelize

EMA = {"ema": {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.5}}


def here(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nbytes(tensors):
    return sum(here(tensor).numel() * here(tensor).element_size() for tensor in tensors)


class Collectives(TorchDispatchMode):
    """Counts the operators of ``torch.distributed`` by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operators of its parts
        if "c10d" in func.namespace and "wait" not in func.__name__ and "wrap" not in func.__name__:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Watch(L.Callback):
    """Counts what this process holds after its last step, and the collectives in each step."""

    def __init__(self):
        self.collectives = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.mode = Collectives()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.mode.__exit__(None, None, None)
        self.collectives.append(dict(self.mode.counts))
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        averages = [each._average_model for each in trainer.callbacks if isinstance(each, WeightAveraging)]
        self.held = {
            "parameters": nbytes(module.network.parameters()),
            "buffers": nbytes(module.network.buffers()),
            "gradients": nbytes(p.grad for p in module.network.parameters() if p.grad is not None),
            "optimizer_states": nbytes(value for value in states if isinstance(value, torch.Tensor)),
            "averaged_weights": sum(nbytes([*average.parameters(), *average.buffers()]) for average in averages),
        }


def held_by(config, folder, **given):
    watch = Watch()
    train_with(config, folder, watch, **given)
    return watch.held


# --- one process

FROZEN = ({"match": "token|q_proj", "trainable": False},)
ADAM = {"_target_": "torch.optim.Adam", "amsgrad": True}
CASES = {
    "adamw": {},
    "sgd": {"optimizer": node(optimizers.sgd)},
    "muon": {"optimizer": node(optimizers.muon)},
    "no momentum": {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}},
    "reads a number": {"optimizer": {"_target_": "torch.optim.Adafactor"}},
    "frozen": {"optimizer": node(optimizers.adamw, rules=FROZEN)},
    "half": {"trainer__precision": "bf16-true", "callbacks": EMA},
    "mixed": {"trainer__precision": "bf16-mixed", "optimizer": {"_target_": "torch.optim.NAdam"}},
    "double": {"trainer__precision": "64-true", "optimizer": ADAM, "callbacks": EMA},
    "shared weights": {"model__tie_embeddings": True, "model__num_layers": 2, "optimizer": node(optimizers.muon)},
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_holds_what_its_plan_says(make_config, tmp_path, monkeypatch, case):
    for name in ("trainer", "memory_plan"):  # as on a CPU with instructions for bfloat16
        monkeypatch.setattr(f"minitx.training.{name}.cpu_precision", str)
    config = make_config(**{"trainer__max_steps": 2, **CASES[case]})
    plan = show_plan(config)
    assert plan == held_by(config, tmp_path / "run")
    assert plan["parameters"] > 0 < plan["gradients"]


def test_a_plan_has_the_labels_of_the_head_that_a_run_starts_from(make_config, tmp_path):
    configs = []
    for labels in ("abc", "ca"):  # the second data has fewer labels, in another order
        path = tmp_path / f"{labels}.csv"
        path.write_text("\n".join(["text,label", *(f"word {n},{labels[n % len(labels)]}" for n in range(40))]))
        data = {"_target_": "minitx.data.classify", "path": str(path), "tokenizer": "char", "batch_size": 12, "max_len": 16}
        model = {"model__architecture": "encoder", "model__head": "sequence"}
        configs.append(make_config(data=data, trainer__max_steps=2, trainer__ckpt_every=2, **model))
    first, second = configs
    train(first, tmp_path / "first")
    second = dataclasses.replace(second, init_from=InitFrom(path=str(tmp_path / "first" / "checkpoints" / "last.ckpt")))
    assert show_plan(second) == held_by(second, tmp_path / "second")
    assert show_plan(second) == show_plan(first)


class Normed(Layered):
    """A network with buffers, a frozen part, and a weight under two names."""

    def __init__(self, vocab_size=7):
        super().__init__(vocab_size)
        self.norm, self.again = nn.BatchNorm1d(8), self.head
        self.embed.requires_grad_(False)

    def forward(self, input_ids):
        return self.again(self.norm(self.layers(self.embed(input_ids))[:, 0]))


def test_a_network_from_python_is_planned_and_stays_as_it_is(make_config, tmp_path):
    rows = [{"input_ids": torch.tensor([i % 7]), "labels": i % 3} for i in range(8)]
    data = Task(name="mine", train=rows, val=rows)
    network = Normed()
    before, state = {name: value.clone() for name, value in network.state_dict().items()}, torch.get_rng_state()
    config = make_config(trainer__max_steps=2)
    plan = show_plan(config, model=network, data=data, batch_size=4)
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert torch.get_rng_state().equal(state) and network.head.weight.device.type == "cpu"
    assert plan == held_by(config, tmp_path / "run", model=network, data=data, batch_size=4)
    assert plan["buffers"] and plan["gradients"] < plan["parameters"]


def test_a_model_is_planned_that_no_machine_here_could_hold():
    words = [
        "model=llama_small",
        "model.embed_dim=8192",
        "model.num_heads=64",
        "model.num_layers=3",
        "model.vocab_size=9000000",
    ]
    words += [
        "trainer.precision=bf16-true",
        "trainer.devices=512",
        "data.batch_size=512",
        "data=kv_lookup",
    ]
    plan = show_plan(compose_config([*words, "trainer.accelerator=gpu", "trainer.strategy=sharded"]))
    whole = 512 * plan["parameters"]
    assert whole > 2 * 9_000_000 * 8192  # half of it is the table
    assert plan["gradients"] == plan["parameters"] and 0 <= plan["optimizer_states"] - 2 * plan["parameters"] < 1000


TINY = ["model.embed_dim=16", "model.num_heads=2", "model.num_layers=2", "model.vocab_size=83"]  # no power of two divides 83
REFUSED = {
    "optimizer=muon": "optimizer=muon needs whole matrices",
    "callbacks=[default,ema]": "callbacks.ema needs whole weights",
    "callbacks.probe.every=5": "callbacks.probe needs whole weights",
    "trainer.shard=[Layer]": "trainer.shard=Layer is not the class of any module",
    "data.batch_size=13": "data.batch_size=13 must be divisible",
    "optimizer._target_=torch.optim.Adafactor": "torch.optim.Adafactor cannot make a step with trainer.strategy=sharded",
    "optimizer.rules=[{match:nonsense,lr:2}]": "matches no parameter name",
    "trainer.accelerator=gup": "trainer.accelerator=gup is not allowed: one of auto, cpu, gpu, mps (did you mean gpu?)",
}
PLAN = [
    "data=kv_lookup",
    "model=recall",
    "trainer.devices=2",
    "trainer.strategy=sharded",
    "data.batch_size=12",
]


@pytest.mark.parametrize("typed", REFUSED)
def test_what_a_sharded_run_would_refuse_its_plan_refuses(typed):
    with pytest.raises(ConfigError) as raised:
        show_plan(compose_config([*PLAN, typed]))
    assert REFUSED[typed] in str(raised.value)
    assert not torch.distributed.is_initialized()


def test_an_optimizer_whose_states_grow_has_no_plan(make_config):
    config = make_config(optimizer={"_target_": "torch.optim.LBFGS"})
    with pytest.raises(ConfigError, match=r"the states of torch\.optim\.LBFGS grow from step to step"):
        show_plan(config)


def test_a_config_that_asks_for_a_plan_is_not_trained(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"call show_plan\(config\)"):
        train(make_config(trainer__plan=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- two processes, and one of 64

BASE = [
    "data=kv_lookup", "model=recall", *TINY, "data.batch_size=128", "data.val_size=128", "trainer.val_batch_size=128",
    "trainer.accelerator=cpu", "trainer.threads=1", "trainer.max_steps=3", "trainer.val_batches=1", "trainer.val_every=0",
    "trainer.ckpt_every=0", "trainer.rehearse=false", "callbacks.progress=false", "schedule.warmup_steps=0",
]  # fmt: skip
EMA_WORDS = ["callbacks=[default,ema]", "callbacks.ema.decay=0.5"]
TWO = {
    "fsdp": ["trainer.strategy=sharded", "optimizer.rules=[{match: q_proj, trainable: false}]"],
    "ddp": ["trainer.strategy=ddp", "optimizer=muon", "trainer.precision=64-true", *EMA_WORDS],
    "fsdp_half": ["trainer.strategy=sharded", "trainer.precision=bf16-true", "optimizer=sgd"],
}


def watched(words, folder):
    trainer_module.cpu_precision = plan_module.cpu_precision = str
    watch = Watch()
    train_with(compose_config(words), folder, watch)
    return watch.held, watch.collectives[1]  # a step that writes no row of metrics.csv


@pytest.mark.parametrize("case", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in TWO if name != "fsdp")])
def test_the_first_of_two_processes_holds_what_the_plan_says_and_the_second_not_more(tmp_path, monkeypatch, case):
    monkeypatch.setattr("minitx.training.memory_plan.cpu_precision", str)
    words = [*BASE, *TWO[case], "trainer.devices=2"]
    plan = show_plan(compose_config(words))
    (first, _), (second, _) = run_ranks(2, watched, words, tmp_path / "run")
    assert first == plan
    assert all(second[name] <= plan[name] for name in plan) and second["parameters"] > 0


def as_the_first_of(count, words, folder):
    """A run of ``count`` processes in this one: what the others would send is this process's own."""
    os.environ.update(environment(0, count, 0))
    with fake_processes(count):
        return watched([*words, f"trainer.devices={count}", "trainer.strategy=sharded"], folder)


def numel_of_parts(config, count, rank):
    """The elements that a process holds of each parameter."""
    network = build_without_numbers(config.model, open_data(config.data, config.trainer))
    with fake_processes(count, rank) as mesh:
        parallelize(network, mesh, layers_to_shard(network))
        return {name: here(parameter).numel() for name, parameter in network.named_parameters()}


def test_parts_of_all_processes_are_the_whole_and_the_first_has_most():
    config = compose_config([*BASE, "model.num_layers=1", "data.batch_size=7"])
    parts = [numel_of_parts(config, 7, rank) for rank in range(7)]
    (whole,) = [numel_of_parts(config, 1, 0)]
    assert {name: sum(part[name] for part in parts) for name in whole} == whole
    assert all(part[name] <= parts[0][name] for part in parts for name in whole)


def test_no_process_of_64_is_without_its_part_of_every_tensor_of_gpt2(tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: tmp_path)
    config = compose_config(["model=gpt2", "model.vocab_size=50304", "data=kjv", "data.batch_size=64"])
    whole, first, last = (numel_of_parts(config, count, rank) for count, rank in ((1, 0), (64, 0), (64, 63)))
    assert first == last == {name: size // 64 for name, size in whole.items()}  # 64 divides each first dimension


def folder_of_llama(folder):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 83}
    with torch.random.fork_rng(devices=[]):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    return [f"model.path={folder}", "model.adopt=true"]


@pytest.mark.slow
def test_a_low_rank_adapter_holds_gradients_and_states_of_its_own_weights_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: tmp_path)
    words = [*(word for word in BASE if not word.startswith("model")), "model=hf", *folder_of_llama(tmp_path / "model")]
    config = compose_config([*words, "model.lora=2"])
    plan = show_plan(config)
    assert plan == held_by(config, tmp_path / "run")
    assert 0 < 2 * plan["gradients"] < plan["optimizer_states"] < plan["parameters"] / 5


NARROW = ["model.embed_dim=64", "model.num_heads=2", "model.ffn_dim=128"]
OF_64 = {
    "gpt2": (12, lambda folder: ["model=gpt2", *NARROW]),
    "adopted": (3, lambda folder: ["model=hf", *folder_of_llama(folder)]),
    "own": (2, lambda folder: ["model._target_=extra.Layered", "trainer.shard=[Layer]"]),
}


@pytest.mark.parametrize("case", ["own", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "adopted"))])
def test_one_of_64_processes_holds_what_the_plan_says_and_gathers_each_layer_twice_a_step(tmp_path, monkeypatch, case):
    """A layer is gathered for its forward pass and for its backward pass, the rest once; gradients are scattered once, and summed for
    their norm. All buffers together are broadcast once: of these models, the one of transformers has some."""
    layers, words_of = OF_64[case]
    words = [word for word in BASE if not word.startswith("model")] + words_of(tmp_path / "model")
    plan = show_plan(compose_config([*words, "trainer.devices=64", "trainer.strategy=sharded"]))
    held, collectives = run_ranks(1, as_the_first_of, 64, words, tmp_path / "run")[0]
    assert held == plan
    assert collectives == {
        **({"broadcast_": 1} if case == "adopted" else {}),
        "_allgather_base_": 2 * layers + 1,
        "_reduce_scatter_base_": layers + 1,
        "all_reduce": 1,
    }
