"""Parts of the user's own: how a node is read and built, what a part is given, and which of them a checkpoint may name."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

import minitx.config.part as part_module
from minitx.cli.compose import compose_config
from minitx.config import ConfigError, Part, TransformerConfig, node
from minitx.config.part import Takes
from minitx.config.schema import Count, Share
from minitx.nn import build_model
from minitx.training.checkpoints import load_model, load_stored
from minitx.training.objectives import build_objective
from minitx.training.run import train
from minitx.training.schedules import Warmup
from minitx.training.trust import check_trusted, data_sets

BUILT = []
"""What a function of the user's was called for. A mistake is found before."""


def load(path: str, *, context_len: Count = 128, seed: int = 0):
    BUILT.append("data")
    return context_len + seed


def net(path: str, *, embed_dim: Count = 8):
    BUILT.append("model")


class Loss:
    def __init__(self, path: str, *, label_smoothing: Share = 0.0):
        BUILT.append("objective")


def steps(parameters, path: str, *, momentum: Share = 0.9):
    BUILT.append("optimizer")


def falling(optimizer, max_steps: int, path: str, *, warmup_steps: Warmup = 0):
    BUILT.append("schedule")


PARTS = {
    "data": (load, "minitx.data.text"),
    "model": (net, "minitx.nn.build_model"),
    "objective": (Loss, "minitx.training.objectives.CrossEntropy"),
    "optimizer": (steps, "minitx.training.optimizers.sgd"),
    "schedule": (falling, "minitx.training.schedules.linear"),
}
WRONG = [
    ("data", {"contextlen": 3}, "data.contextlen is not a key (did you mean data.context_len?)"),
    ("data", {"context_len": None}, "data.context_len=null is not allowed: it must be a whole number"),
    ("model", {"embed_dims": 8}, "model.embed_dims is not a key (did you mean model.embed_dim?)"),
    ("model", {"embed_dim": "x"}, "model.embed_dim=x must be a whole number, got str"),
    ("objective", {"label_smooth": 0.1}, "objective.label_smooth is not a key (did you mean objective.label_smoothing?)"),
    ("objective", {"label_smoothing": 1}, "objective.label_smoothing=1.0 must lie in [0, 1)"),
    ("optimizer", {"momentun": 0.9}, "optimizer.momentun is not a key (did you mean optimizer.momentum?)"),
    ("optimizer", {"momentum": True}, "optimizer.momentum=true must be a number, got bool"),
    ("schedule", {"warmup": 3}, "schedule.warmup is not a key (did you mean schedule.warmup_steps?)"),
    (
        "schedule",
        {"warmup_steps": -1},
        "schedule.warmup_steps=-1 must be a whole number of steps, or a share of all steps below 1",
    ),
]


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    module = types.ModuleType("mine_of_parts")
    module.Mean, module.make, module.loss = Mean, lambda items: items, lambda logits, batch, power=2: (logits**power).sum()
    vars(module).update({function.__name__: function for function, _ in PARTS.values()})
    monkeypatch.setitem(sys.modules, "mine_of_parts", module)
    BUILT.clear()


def test_lists_and_nested_parts_arrive_as_plain_python():
    node = {"_target_": "mine_of_parts.make", "items": [{"a": 1}, {"_target_": "mine_of_parts.Mean", "head_dim": 2}]}
    found = Part.of(node, "data").build()
    assert (type(found), type(found[0]), found[1].head_dim) == (list, dict, 2)


def test_a_run_looks_each_part_up_once_and_builds_the_config_of_its_model_twice(monkeypatch, tmp_path):
    """As it was typed, and as the data decide."""
    found, built = [], []
    find, check = part_module.find_target, TransformerConfig.check
    monkeypatch.setattr(part_module, "find_target", lambda name, path: found.append(path) or find(name, path))
    monkeypatch.setattr(TransformerConfig, "check", lambda self: built.append(self.vocab_size) or check(self))
    words = ["experiment=kv_lookup", "trainer.max_steps=2", "trainer.accelerator=cpu", "callbacks.progress=false"]
    train(
        compose_config([*words, "callbacks=[default,lr_monitor]", "data.val_size=8", "trainer.val_every=0"]), tmp_path / "run"
    )
    assert sorted(found) == ["callbacks.lr_monitor", "callbacks.probe", "data", "model", "objective", "optimizer", "schedule"]
    assert len(built) == 2 and built[0] is None and built[1] is not None


# --- what a checkpoint may name


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.hub.load", "repo_or_dir": "x", "model": "y"},
        {"_target_": "torch.nn.modules.os.system"},
        {"_target_": "torch.nn.init.torch.load"},
        {"_target_": "mine_of_parts.Mean"},
        {"_target_": "minitx.training.run.train"},
        {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "os.system", "command": "touch owned"}]},
        {"_target_": "torch.nn.Sequential", "a": {"b": [{"_target_": "torch.hub.load"}]}},
        {"_target_": "minitx.interop.pretrained_hf", "path": "somebody/model"},
        {"_target_": "minitx.interop.hf_from_config", "config": {"x": {"_target_": "os.system"}}},
        {"_target_": "${x}", "x": "os.system"},
    ],
    ids=lambda node: str(node["_target_"]),
)
def test_a_checkpoint_may_name_classes_of_torch_and_of_ours_alone(node, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.* in the checkpoint .*trust=true"):
        check_trusted(node, "model")
    assert list(tmp_path.iterdir()) == []


def test_a_text_of_a_checkpoint_that_looks_like_an_interpolation_stays_a_text():
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.Identity", "${oc.env:HOME}": "${oc.env:HOME}"}],
    }
    check_trusted(node, "model")
    assert Part.of(node, "model").args[0].arguments == {"${oc.env:HOME}": "${oc.env:HOME}"}


@pytest.mark.parametrize("target", ["torch.nn.modules.linear.Linear", "minitx.nn.DecoderLM"])
def test_models_of_torch_and_of_ours_need_no_trust(target):
    check_trusted({"_target_": "torch.nn.Sequential", "_args_": [{"_target_": target, "in_features": 2}]}, "model")
    check_trusted({"_target_": "minitx.interop.hf_from_config", "config": {"model_type": "llama"}}, "model")


def test_of_data_a_checkpoint_may_name_our_data_sets_alone():
    assert {"minitx.data.kjv", "minitx.data.hf", "minitx.data.kv_lookup"} <= data_sets()
    for target in data_sets():
        check_trusted({"_target_": target, "path": "x"}, "data")
    others = "minitx.data.Task", "minitx.data.corpus.kjv", "minitx.data.tables.load_table", "torch.nn.Linear", "own.load"
    for target in others:
        with pytest.raises(ConfigError, match=r"^data\._target_=.*is not a data set of minitx.*trust=true"):
            check_trusted({"_target_": target}, "data")
    with pytest.raises(ConfigError, match=r"^data\.tokenizer\._target_="):
        check_trusted({"_target_": "minitx.data.kjv", "tokenizer": {"_target_": "os.system"}}, "data")


def test_a_checkpoint_does_not_say_where_files_are_written(make_config, tmp_path):
    config = make_config(trainer__max_steps=1, trainer__ckpt_every=1)
    config = replace(config, data=config.data.with_(cache_dir=str(tmp_path / "caches")))
    train(config, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert any((tmp_path / "caches").iterdir())
    assert load_stored(path).part("data").get("cache_dir") is None
    assert load_stored(path, changes={"data": {"cache_dir": "mine"}}).part("data").get("cache_dir") == "mine"
    assert load_stored(path, trust=True).part("data").plain() == config.data.plain()


# --- how a node is read: a mistake gives the same sentence for a part of ours and for an annotated function of the user's


@pytest.fixture
def refused(make_config, tmp_path):
    """``refused("data", {...})``: what a run says of this node, before it has built the part or written anything."""

    def start(part, node):
        with pytest.raises(ConfigError) as found:
            train(make_config(**{part: node}), tmp_path / "run")
        assert part not in BUILT and not (tmp_path / "run").exists()
        return str(found.value)

    return start


@pytest.mark.parametrize(("part", "wrong", "said"), WRONG)
def test_a_mistake_gives_the_same_sentence_for_a_part_of_ours_and_a_function_of_the_users(part, wrong, said, refused):
    mine, ours = PARTS[part]
    assert refused(part, {"_target_": f"mine_of_parts.{mine.__name__}", "path": "text.txt", **wrong}) == said
    assert refused(part, {"_target_": ours, **({"path": "text.txt"} if part == "data" else {}), **wrong}) == said


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_key_gives_the_same_sentence(part, refused):
    """Of ours, some data sets and one model have a key that must be given."""
    ours = {"data": "minitx.data.text", "model": "minitx.interop.pretrained_hf"}
    for target in (f"mine_of_parts.{PARTS[part][0].__name__}", ours.get(part)):
        assert target is None or refused(part, {"_target_": target}) == f"{part}.path is missing"


@pytest.mark.parametrize(
    ("part", "target"), [("optimizer", "torch.optim.Adam"), ("schedule", "torch.optim.lr_scheduler.ConstantLR")]
)
def test_an_optimizer_or_schedule_that_stays_partial_is_refused(part, target, refused):
    assert refused(part, {"_target_": target, "_partial_": True}).startswith(f"{part}._partial_=true must be removed")


def test_a_function_of_the_users_gets_its_keys_by_type_and_what_it_names_of_the_run():
    node = {"_target_": "mine_of_parts.load", "path": "x", "context_len": 4.0}
    part = Part.of(node, "data", Takes(offers=("seed", "batch_size")))
    assert part.build(seed=5, batch_size=7) == 9


def test_a_mistake_in_a_nested_node_is_said_of_its_own_key():
    node = {"_target_": "torch.nn.ParameterDict", "parameters": {"inner": {"_target_": "torch.nn.Linear", "in_feature": 3}}}
    with pytest.raises(
        ConfigError, match=r"^model\.parameters\.inner\.in_feature is not a key \(did you mean \S+in_features\?\)"
    ):
        Part.of(node, "model")


def test_a_nested_node_is_not_built_where_another_key_is_wrong(monkeypatch):
    built = []
    monkeypatch.setattr(sys.modules["mine_of_parts"], "note", lambda: built.append(1), raising=False)
    node = {"_target_": "mine_of_parts.make", "items": {"_target_": "mine_of_parts.note"}, "item": 3}
    with pytest.raises(ConfigError, match=r"^model\.item is not a key"):
        Part.of(node, "model")
    assert built == []


# --- objectives, optimizers, schedules


def test_a_function_of_logits_and_batch_is_the_objective_itself_and_one_that_returns_it_is_called():
    own = {"_target_": "mine_of_parts.loss", "power": 1}
    assert build_objective(Part.of(own, "objective", Takes(offers=None)))(torch.tensor([1.0, 2.0]), {}) == 3.0
    assert build_objective(Part.of({"_target_": "mine_of_parts.make", "items": len}, "objective")) is len


class Mean(nn.Module):
    """The mean of the values that a query sees, times a learned number."""

    def __init__(self, head_dim: int, start: float = 1.0) -> None:
        super().__init__()
        self.head_dim, self.gain = head_dim, nn.Parameter(torch.tensor(start))

    def forward(self, call):
        visible = call.visible().expand(*call.shape).to(call.value.dtype)
        return self.gain * (visible / visible.sum(-1, keepdim=True)) @ call.value


def test_an_attention_of_ones_own_trains_and_comes_back_from_its_checkpoint_with_trust(make_config, tmp_path):
    own = {"_target_": "mine_of_parts.Mean", "start": 0.5}
    model = node(build_model, embed_dim=12, num_heads=3, num_layers=2, max_len=32, attention=own)
    data = {"_target_": "minitx.data.kv_lookup", "batch_size": 8, "val_size": 8}
    train(make_config(model=model, data=data, trainer__max_steps=2, trainer__ckpt_every=2), tmp_path)
    path = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ConfigError, match=r"mine_of_parts\.Mean"):
        load_model(path)
    model, _, _ = load_model(path, trust=True)
    cores = [block.attention.core for block in model.blocks]
    assert all(isinstance(core, Mean) and core.head_dim == 4 and core.gain != 0.5 for core in cores)
    ids = torch.arange(14).view(2, 7)
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]))  # the mask of the call is the model's
