"""How a node is read: a mistake in it gives the same sentence for a part of ours and for an annotated function of the user's."""

import sys
import types

import pytest

from minitx.config import ConfigError
from minitx.config.schema import Count, Natural, Share
from minitx.training.nodes import build
from minitx.training.run import train

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


def falling(optimizer, max_steps: int, path: str, *, warmup_steps: Natural = 0):
    BUILT.append("schedule")


PARTS = {
    "data": (load, "minitx.data.text"),
    "model": (net, "minitx.nn.build_model"),
    "objective": (Loss, "minitx.training.objectives.CrossEntropy"),
    "optimizer": (steps, "minitx.training.optimizers.sgd"),
    "schedule": (falling, "minitx.training.optimizers.linear"),
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
    ("schedule", {"warmup_steps": -1}, "schedule.warmup_steps=-1 must be zero or more, and finite"),
]


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    module = types.ModuleType("mine_of_nodes")
    for function, _ in PARTS.values():
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "mine_of_nodes", module)
    BUILT.clear()


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
    assert refused(part, {"_target_": f"mine_of_nodes.{mine.__name__}", "path": "text.txt", **wrong}) == said
    assert refused(part, {"_target_": ours, **({"path": "text.txt"} if part == "data" else {}), **wrong}) == said


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_key_gives_the_same_sentence(part, refused):
    """Of ours, some data sets and one model have a key that must be given."""
    ours = {"data": "minitx.data.text", "model": "minitx.interop.pretrained_hf"}
    for target in (f"mine_of_nodes.{PARTS[part][0].__name__}", ours.get(part)):
        assert target is None or refused(part, {"_target_": target}) == f"{part}.path is missing"


def test_a_function_of_the_users_gets_its_keys_by_type_and_what_it_names_of_the_run():
    node = {"_target_": "mine_of_nodes.load", "path": "x", "context_len": 4.0}
    assert build(node, "data", {"seed": 5, "batch_size": 7}) == 9


def test_a_mistake_in_a_nested_node_is_said_of_its_own_key():
    node = {"_target_": "torch.nn.ParameterDict", "parameters": {"inner": {"_target_": "torch.nn.Linear", "in_feature": 3}}}
    with pytest.raises(ConfigError, match=r"^model\.parameters\.inner cannot be built: TypeError: Linear.*'in_feature'"):
        build(node, "model")
