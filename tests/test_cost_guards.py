"""Speed kept without a stop-watch: what a step dispatches, reads, allocates and imports, counted."""

from __future__ import annotations

import builtins
import dataclasses
import gc
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minitx
from minitx.canvas import panels
from minitx.cli import importing
from minitx.config import Part, RunConfig, TrainerConfig, TransformerConfig, node
from minitx.data import kv_lookup
from minitx.nn import Causal, DecoderLM, Padding, build_model
from minitx.nn.backends import chunked, sdpa
from minitx.nn.counting import allocations
from minitx.training.module import TrainingModule
from minitx.training.objectives import CrossEntropy
from minitx.training.optimizers import adamw
from minitx.training.run import train

PACKAGE = Path(minitx.__file__).parent
SCRIPTS = sorted((Path(__file__).parents[1] / "scripts").glob("*.py"))
# seconds each; torch is wanted by a run, but not by an answer to --help
HEAVY = {"wandb", "datasets", "transformers", "matplotlib", "scipy", "sklearn", "babel", "pythonbible", "sacrebleu", "pandas"}


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched, and by which function the values of tensors are read."""

    def __init__(self):
        super().__init__()
        self.ops, self.readers = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        self.ops[name] += 1
        if name == "_local_scalar_dense":
            frames = traceback.extract_stack()
            ours = (frame.name for frame in reversed(frames) if Path(frame.filename).is_relative_to(PACKAGE))
            self.readers[next(ours, frames[-2].name)] += 1
        return func(*args, **(kwargs or {}))


def config(steps, *, layers=1, **groups):
    values = {
        "model": node(build_model, embed_dim=8, num_heads=2, num_layers=layers, ffn_dim=16, max_len=32),
        "data": node(kv_lookup, batch_size=12, val_size=5),
        "optimizer": node(adamw, weight_decay=0.1),
        "objective": node(CrossEntropy),
        "trainer": TrainerConfig(
            max_steps=steps, clip=1.0, accelerator="cpu", val_every=0, log_every=1000, ckpt_every=0, rehearse=False
        ),
        "callbacks": {},
    }
    for name, keys in groups.items():
        of = values[name]
        values[name] = (
            keys if name == "callbacks" else of.with_(**keys) if isinstance(of, Part) else dataclasses.replace(of, **keys)
        )
    return RunConfig(**values)


def step_of(folder, **options):
    """What one optimizer step between two log points dispatches: of a run of 13 steps and one of 8, the difference."""
    runs = []
    for steps in (8, 13):
        with Dispatched() as seen:
            train(config(steps, **options), folder / str(steps))
        runs.append(seen)
    return tuple({name: (longer[name] - shorter[name]) / 5 for name in longer if longer[name] != shorter[name]}
                 for shorter, longer in ((runs[0].ops, runs[1].ops), (runs[0].readers, runs[1].readers)))  # fmt: skip


READ_ON_THE_CPU = {"check_range": 6.0}  # smallest and largest id of three tables, refused before torch crashes on them


def test_on_a_cpu_a_step_reads_the_ids_and_once_whether_the_numbers_are_finite(tmp_path):
    assert step_of(tmp_path)[1] == {**READ_ON_THE_CPU, "first_bad_step": 1.0}


@pytest.mark.parametrize("changes", [{}, {"objective": {"chunk_tokens": 50}}], ids=str)
def test_on_an_accelerator_a_step_reads_no_value_between_log_points(tmp_path, monkeypatch, changes):
    """Simulated: the module believes that it is not on a CPU."""
    monkeypatch.setattr(TrainingModule, "device", property(lambda self: torch.device("meta")))
    ops, readers = step_of(tmp_path, **changes)
    assert readers == READ_ON_THE_CPU
    assert not ops.keys() & {"nonzero", "unique", "is_nonzero", "masked_select", "item"}  # whose sizes are values


def test_a_layer_costs_eighteen_products_and_one_fused_attention_and_the_update_does_not_grow_with_the_layers(tmp_path):
    """Six matrices a layer (Q, K, V, O, up, down), each in one product forward and two backward; norm, clipping and update are one
    operation each for all of a group's parameters."""
    one, three = (step_of(tmp_path / str(layers), layers=layers)[0] for layers in (1, 3))
    layer = {name: (three[name] - one.get(name, 0)) / 2 for name in three}
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert layer["mm"] + layer["addmm"] == 18 and layer[fused] == layer[f"{fused}_backward"] == 1
    assert layer["native_layer_norm"] == layer["native_layer_norm_backward"] == 2
    assert not any(layer.get(name) for name in ("bmm", "copy_", "_softmax", "clone", "_to_copy"))
    for name in ("_foreach_norm", "_foreach_mul_", "_fused_adamw_", "linalg_vector_norm"):
        assert one[name] == three[name] <= 2, name
    outside = sum(one.values()) - (sum(three.values()) - sum(one.values())) / 2
    # 120 in torch 2.13: embeddings, loss, head, right answers, clipping, latch, optimizer and Lightning together
    assert outside <= 124


LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "qk_norm": "rms", "num_kv_heads": 1}


def small(layers, training=False, **options):
    sizes = {"vocab_size": 11, "embed_dim": 32, "num_heads": 2, "max_len": 64}
    model = DecoderLM(TransformerConfig(**sizes, num_layers=layers, **options)).train(training)
    ids, real = torch.randint(11, (2, 7)), torch.arange(7)[None] >= torch.tensor([[2], [0]])
    return lambda: model(ids, key_mask=real)


def test_at_most_seven_frames_lie_between_a_models_forward_and_torchs_kernel(monkeypatch):
    depths, kernel = [], sdpa.F.scaled_dot_product_attention

    def counting(*args, **kwargs):
        frame, found = sys._getframe(1), []
        while frame is not None:
            found += [frame.f_code.co_qualname] * frame.f_code.co_filename.startswith(str(PACKAGE))
            frame = frame.f_back
        depths.append(found)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", counting)
    small(2, **LLAMA)()
    assert len(depths) == 2
    for found in depths:
        assert found[-1] == "DecoderLM.forward"
        assert len(found) <= 7, found


@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9)], ids=str)
def test_a_mask_is_lowered_once_a_forward_and_not_once_a_layer(monkeypatch, backend, windows):
    """Padding and Causal become one tensor for all layers with the same window."""
    lowered = Counter()

    def counting(owner, name):
        real = getattr(owner, name)

        def count(self, *args, **kwargs):
            lowered[owner] += 1
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counting(Padding, "dense")
    counting(Causal, "visible")
    monkeypatch.setattr(TransformerConfig, "window_of", lambda self, layer: windows[layer % len(windows)])
    forward = small(5, backend=backend)
    for forwards in (1, 2):
        forward()
        assert lowered == {Padding: len(windows) * forwards, Causal: len(windows) * forwards}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {**LLAMA, "qk_norm": None}], ids=str)
def test_a_layer_with_a_key_mask_calls_at_most_45_functions_of_minitx(options, training):
    """Every Python frame of a file of the package counts, properties and comprehensions included."""

    def calls(layers):
        forward, seen = small(layers, training, **options), Counter()

        def count(frame, event, argument):
            if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                seen[frame.f_code.co_qualname] += 1

        sys.setprofile(count)
        try:
            forward()
        finally:
            sys.setprofile(None)
        return seen

    one, three = calls(1), calls(3)
    layer = {name: (three[name] - one[name]) / 2 for name in three if three[name] != one[name]}
    assert layer["MultiHeadAttention.forward"] == layer["DotProductAttention.forward"] == 1
    assert sum(layer.values()) <= 45, layer


LENGTH = 640  # where the workspace of torch's fused kernel is smaller than a matrix of bools


@pytest.mark.parametrize(("options", "padded"), [
    ({}, False),
    ({"position": "rotary", "num_kv_heads": 1, "activation": "swiglu", "scale": "learned", "qk_norm": "rms"}, False),
    ({"dropout": 0.1, "num_heads": 32, "embed_dim": 32}, True),
    ({"sinks": True, "softcap": 5.0, "num_heads": 8, "window": 9}, False),
], ids=str)  # fmt: skip
def test_a_training_step_holds_no_matrix_of_queries_by_keys(options, padded):
    """Not even for one head, or with ``chunked`` no more than a tile; ``math``, the control, has one of all heads."""
    sizes = {"vocab_size": 11, "embed_dim": 16, "num_heads": 2, "num_layers": 1, "ffn_dim": 32, "max_len": LENGTH}
    ids, real = torch.randint(11, (1, LENGTH)), torch.arange(LENGTH)[None] < LENGTH - 7

    def step(**more):
        model = DecoderLM(TransformerConfig(**{**sizes, **options, **more}))
        return allocations(lambda: model(ids, key_mask=real if padded else None).sum().backward())[0]

    assert step() <= (4 * chunked.TILE if options.get("num_heads", 2) >= 8 else LENGTH**2 - 1)  # not even one of bools
    assert step(backend="math") >= 4 * options.get("num_heads", 2) * LENGTH**2


# --- imports


HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
    print("loaded:", script, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_every_script_answers_help_without_torch_or_anything_heavy(tmp_path):
    """One process for all: what any of them loads is there at the end. ``train.py`` is last: it lists the arguments of a data set,
    a function whose module needs torch."""
    scripts = sorted(SCRIPTS, key=lambda script: script.name == "train.py")
    command = [sys.executable, "-c", HELP, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    said, *answers = done.stdout.strip().split("loaded: ")
    assert said and len(answers) == len(scripts)
    for script, answer in zip(scripts, answers, strict=True):
        loaded, *following = answer.splitlines()
        assert loaded.startswith(str(script)) and (following or script == scripts[-1])
        needed = {"torch", "numpy", "tokenizers"} if script.name == "train.py" else set()
        unwanted = (HEAVY | {"torch", "numpy", "lightning", "tokenizers", "huggingface_hub"}) - needed
        assert not set(loaded.split()) & unwanted, script


@pytest.mark.slow
def test_evaluating_generating_looking_and_checking_load_neither_lightning_nor_fsdp_nor_sympy():
    """They take longer than what these programs do with a small checkpoint."""
    modules = "training.evaluation", "training.checkpoints", "cli.view_models", "generation", "analysis.viewer", "check"
    code = f"import sys, {', '.join(f'minitx.{name}' for name in modules)}\n"
    code += "minitx.check.check_attention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)\n"
    code += "print({'lightning', 'transformers', 'torch.distributed.fsdp', 'sympy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


REFUSED = {
    "train": ["experiment=char_lm", "callbacks.progress=false", "data=text", "data.path=missing.txt"],
    "generate": ["ckpt_path=missing.ckpt", "prompt=a"],
    "evaluate": ["ckpt_path=missing.ckpt"],
    "export": ["ckpt_path=missing.ckpt", "output=folder"],
    "view": ["ckpt_path=missing.ckpt", "text=a"],
    "check": ["mine.py:missing"],
}
"""Command lines that are refused after the imports of the program."""


@pytest.mark.slow
@pytest.mark.parametrize("program", REFUSED)
def test_no_full_collection_of_garbage_interrupts_the_imports_of_a_program(tmp_path, program):
    """Each would visit all objects of torch and Lightning that there are by then."""
    (tmp_path / "mine.py").write_text("import torch\n", encoding="utf-8")
    code = (
        "import gc, sys\n"
        f"from minitx.cli import minitx_{program}\n"
        "generations = []\n"
        "gc.callbacks.append(lambda phase, info: 'torch' in sys.modules and generations.append(info['generation']))\n"
        f"code, library = minitx_{program}(), {'lightning' if program == 'train' else 'torch'!r}\n"
        "print(code, library in sys.modules, gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()), 2 in generations)"
    )
    command = [sys.executable, "-c", code, *REFUSED[program]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "2 True True True False"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_pause_for_imports_leaves_the_collector_as_it_was(monkeypatch, is_enabled):
    """Only the first import of a library ends with freezing: later objects may become garbage."""
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    gc.collect()  # what is frozen stays
    frozen = gc.get_freeze_count()
    try:
        if not is_enabled:
            gc.disable()
        with importing():
            assert gc.isenabled() == is_enabled
        assert gc.isenabled() == is_enabled
        assert gc.get_freeze_count() <= frozen  # fewer if the process lets go of a frozen object meanwhile
        with importing("lightning"):
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
        assert (gc.get_freeze_count() > frozen) == is_enabled
    finally:
        gc.enable()


def test_a_run_imports_nothing_heavy_of_its_own(tmp_path, monkeypatch):
    """What Lightning brings (torchmetrics, and with it scipy or transformers where they are installed) is not ours to refuse."""
    asked, real = set(), builtins.__import__

    def watch(name, globals=None, *rest):
        if ((globals or {}).get("__name__") or "").startswith("minitx") and name.partition(".")[0] in HEAVY:
            asked.add((globals["__name__"], name))
        return real(name, globals, *rest)

    monkeypatch.setattr(builtins, "__import__", watch)
    small = config(2, trainer={"ckpt_every": 1}, callbacks={"probe": {"every": 1, "batch_size": 3}})
    train(small, tmp_path)
    assert asked == set()
    panels(1, 1)  # the watch itself: a figure does import matplotlib
    assert {name.partition(".")[0] for _, name in asked} == {"matplotlib"}
