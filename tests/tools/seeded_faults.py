"""Sixty seeded faults: what the suite notices, what the lattices notice.

    python tests/tools/seeded_faults.py --list                  # the faults, with the places that they change
    python tests/tools/seeded_faults.py suite                   # every fault that has no result yet, against the quick tests
    python tests/tools/seeded_faults.py calls models runs       # the same against the lattices
    python tests/tools/seeded_faults.py calls --only fold_lora  # one fault, again
    python tests/tools/seeded_faults.py                         # the table of the results

Thirty faults are drawn by a seed from all changes of ``mutants.py`` to nn, training, analysis, interop, generation and data. Thirty are
written (``WRITTEN``): mistakes that people make where two options meet. They were written before the lattices were read.

No file is changed. For each fault a process forks, and imports the changed code of one module in the place of its own; so do the
processes that it starts. The judge then runs to the first failure: of the suite the quick tests that are about the changed module, of a
lattice the points of its quick tests, then the points of its slow tests. The clean control is the same without a fault; a test or a
point that fails there notices nothing. What is known is kept in ``build/seeded/results.json``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import marshal
import os
import pkgutil
import random
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import mutants as machinery
import pytest
from mutants import ROOT

sys.path.insert(0, str(ROOT))
from tests.lattice.engine import Lattice, Oracle, Point, Where, matches

WORK = ROOT / "build/seeded"
SEED = 61
PACKAGES = ("nn", "training", "analysis", "interop", "generation", "data")
LATTICES = ("calls", "models", "runs")
LIMITS = {"suite": 20, "calls": 60, "models": 60, "runs": 120}
"""Seconds of the processor that a judge may take for a fault."""


@dataclass(frozen=True)
class Fault:
    """A faulty version of one function: ``after`` stands where ``before`` stood.

    Attributes:
        place: the file and the qualified name of the function.
        line: one sentence about what is wrong.
    """

    name: str
    line: str
    place: str
    before: str
    after: str

    @property
    def file(self) -> str:
        return self.place.partition(":")[0]

    @property
    def scope(self) -> str:
        return self.place.partition(":")[2]

    def code(self) -> CodeType:
        """The code of the changed module.

        Raises:
            ValueError: ``before`` does not stand exactly once in the function.
        """
        source = (ROOT / self.file).read_text()
        lines = source.splitlines(keepends=True)
        first, last = _extent(ast.parse(source), self.scope)
        body = "".join(lines[first - 1 : last])
        if body.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {body.count(self.before)} times in {self.place}")
        changed = "".join([*lines[: first - 1], body.replace(self.before, self.after), *lines[last:]])
        return compile(changed, str(ROOT / self.file), "exec", dont_inherit=True)


def _extent(tree: ast.AST, scope: str) -> tuple[int, int]:
    """The first and the last line of a function by its qualified name."""
    node: Any = tree
    for name in scope.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == name]
        if len(found) != 1:
            raise ValueError(f"there is no {scope}")
        node = found[0]
    return node.lineno, node.end_lineno


WRITTEN = (
    # --- one call of attention
    Fault(
        "chunked_dropout_half",
        "chunked × dropout × bfloat16: the gradient of the values has no dropout",
        "minitx/nn/backends/chunked.py:Gradients.forward",
        "over_group(weights if factors is None else weights * factors,",
        "over_group(weights if factors is None or value.dtype == torch.bfloat16 else weights * factors,",
    ),
    Fault(
        "chunked_softcap_bias",
        "chunked × soft-cap × learned bias: the gradient of the bias goes through the soft-cap, too",
        "minitx/nn/backends/chunked.py:Gradients.forward",
        """                    bias_gradient.add(d_logits, rows, keys)
                    if capped is not None and settings.softcap is not None:
                        d_logits = d_logits * (1.0 - (capped / settings.softcap).square_())
""",
        """                    if capped is not None and settings.softcap is not None:
                        d_logits = d_logits * (1.0 - (capped / settings.softcap).square_())
                    bias_gradient.add(d_logits, rows, keys)
""",
    ),
    Fault(
        "sdpa_scale_zero",
        "sdpa × a scale of 0: the kernel multiplies -inf by it",
        "minitx/nn/backends/sdpa.py:run",
        "if scale <= 0.0:",
        "if scale < 0.0:",
    ),
    Fault(
        "grouped_mask_per_head",
        "grouped heads × a mask for each head: a key is erased that one head of the group does not see",
        "minitx/nn/functional.py:visible_keys",
        "(num_kv_heads, -1)).any(dim=2)",
        "(num_kv_heads, -1)).all(dim=2)",
    ),
    Fault(
        "documents_cache",
        "documents × a cache: the new queries have the document of the first tokens",
        "minitx/nn/masks.py:Documents.visible",
        "self.ids[batch, row + offset]",
        "self.ids[batch, row]",
    ),
    # --- a model
    Fault(
        "cross_cache_norm",
        "cross-attention × cache × QK-norm: from the second token on, queries have no norm",
        "minitx/nn/attention.py:MultiHeadAttention.project",
        "return q if self.qk_norm is None else self.qk_norm(q, None)[0], None, None",
        "return q, None, None",
    ),
    Fault(
        "cache_window_pieces",
        "cache × window: no room for a piece of several tokens after the earlier ones",
        "minitx/nn/cache.py:LayerCache.append",
        "kept + max(L, self.window or self.capacity)",
        "max(L, self.window or self.capacity)",
    ),
    Fault(
        "cache_padding",
        "cache × padding: the padding of the prompt is forgotten at the first token without a mask",
        "minitx/nn/cache.py:KVCache.join",
        "if self.length and (key_mask is not None or self.key_mask is not None):",
        "if self.length and key_mask is not None:",
    ),
    Fault(
        "packed_padding_positions",
        "packed × padding: padding inside of a document counts as a position",
        "minitx/nn/positions.py:position_ids_from",
        "if key_mask is None else key_mask.long()",
        "if key_mask is None or document_ids is not None else key_mask.long()",
    ),
    Fault(
        "log_length_cache_padding",
        "scale=log_length × padding × cache: for a single query, padding counts as length",
        "minitx/nn/masks.py:real_key_counts",
        "for part in parts if isinstance(part, Padding)]",
        "for part in parts if isinstance(part, Padding) and num_queries > 1]",
    ),
    Fault(
        "checkpointing_dropout",
        "checkpointing × dropout: the second run draws other numbers",
        "minitx/nn/blocks.py:run_checkpointed",
        "use_reentrant=False, **options",
        "use_reentrant=False, preserve_rng_state=False, **options",
    ),
    Fault(
        "capture_deepcopy",
        "capture × deepcopy: the copy goes on recording",
        "minitx/analysis/recorder.py:Hook.__reduce__",
        "return Hook, ()",
        "return Hook, (self.run,)",
    ),
    Fault(
        "fold_lora",
        "fold_scale × LoRA, quantised or parametrised projections: folded instead of refused",
        "minitx/nn/folding.py:_why_not_fold",
        "{', '.join(faults)}\" if faults else None",
        "{', '.join(faults)}\" if not modules else None",
    ),
    Fault(
        "release_after_fold",
        "adopted × fold_scale × release: only the first projection of a layer gets its weights back",
        "minitx/interop/adopt.py:release_hf",
        "for fold in reversed(core.folds):",
        "for fold in core.folds[:1]:",
    ),
    Fault(
        "adopted_autocast",
        "adopted × rotary × autocast: the query stays in float32 beside values in bfloat16",
        "minitx/interop/adopted_core.py:attention_function",
        "query, key = call.query.to(value), call.key[:, :, :S].to(value)",
        "query, key = call.query, call.key[:, :, :S].to(value)",
    ),
    Fault(
        "intervene_values_grouped",
        "intervene on values × grouped heads: the keys go to other heads",
        "minitx/analysis/interventions.py:_Change.enter",
        "(tensor.repeat_interleave(group, dim=1) for tensor in (call.key, call.value))",
        "(tensor.repeat(1, group, 1, 1) for tensor in (call.key, call.value))",
    ),
    Fault(
        "lora_tied",
        "LoRA × tied embeddings: the merge of one changes the other",
        "minitx/interop/lora.py:merged",
        "_untie(model)",
        "pass",
    ),
    Fault(
        "beam_rows",
        "beam search × several prompts: every row goes on with the caches of the first prompt",
        "minitx/generation/decoding.py:beam_search",
        "rows = (parents + k * torch.arange(B, device=parents.device).unsqueeze(1)).flatten()",
        "rows = parents.flatten()",
    ),
    Fault(
        "chunk_tokens_smoothing",
        "chunk_tokens × label smoothing: the gradient at the label is that without smoothing",
        "minitx/training/objectives.py:_gradient",
        "torch.full_like(hit, smoothing - 1.0, dtype=d_logits.dtype)",
        "torch.full_like(hit, -1.0, dtype=d_logits.dtype)",
    ),
    # --- a run
    Fault(
        "accumulate_counts",
        "accumulate × rows of different lengths: a step divides by the targets of its first micro-batch",
        "minitx/data/batches.py:TrainSource.batch",
        "count(self.split, whole, self._draw(step, 0), batch if len(rows) == len(whole) else None)",
        "len(whole) // len(rows) * int(num_targets(batch['labels']))",
    ),
    Fault(
        "record_first_step",
        "on_nonfinite=record × the first step: a run that fails there counts as finished",
        "minitx/training/outcome.py:summarise",
        'nonfinite.step + (nonfinite.phase == "training")',
        "nonfinite.step",
    ),
    Fault(
        "resume_accumulate_rate",
        "resume × warm-up × accumulate: the rate of the first step counts micro-batches",
        "minitx/training/module.py:TrainingModule.on_train_start",
        "factor(schedule.last_epoch)",
        "factor(schedule.last_epoch * self.trainer.accumulate_grad_batches)",
    ),
    Fault(
        "crash_after_save",
        "a crash just after a save × resume: the row of the step that was saved is removed",
        "minitx/training/metrics_csv.py:MetricsFile.begin",
        'if row["step"] <= self._start_step]',
        'if row["step"] < self._start_step]',
    ),
    Fault(
        "stop_at_resume",
        "stop_at × resume: the window of the metric begins anew",
        "minitx/training/stop_at_value.py:StopAt.load_state_dict",
        'state_dict["reached"], list(state_dict["last"])',
        'state_dict["reached"], []',
    ),
    Fault(
        "samples_stop_at",
        "samples × stop_at × resume: a run that goes on after its end writes its last samples again",
        "minitx/training/samples.py:Samples.on_train_start",
        "self._written = trainer.global_step",
        "self._written = 0",
    ),
    Fault(
        "best_resume",
        "monitor × resume: a worse validation replaces best.ckpt",
        "minitx/training/checkpoint_callbacks.py:BestCheckpoint.load_state_dict",
        'super().load_state_dict({**state_dict, **score, "dirpath": self.dirpath, "best_model_path": str(path)})',
        "self.best_model_path = str(path)",
    ),
    Fault(
        "stream_workers_accumulate",
        "streaming × workers × accumulate: all micro-batches of a step are read from one part",
        "minitx/data/documents.py:StreamSource.batch",
        "part = micro % self.parts",
        "part = step % self.parts",
    ),
    Fault(
        "ema_test_best",
        "EMA × evaluation.test=best: the trained weights are tested, and not their average",
        "minitx/training/evaluation.py:evaluate_splits",
        "drop_average(callback)",
        "pass",
    ),
    Fault(
        "ddp_gradient",
        "several processes: the gradient is divided by their number once too often",
        "minitx/training/module.py:TrainingModule.training_step",
        "return share * world * accumulate",
        "return share * accumulate",
    ),
    Fault(
        "fsdp_groups",
        "sharded × several parameter groups × resume: the moments go to other parameters",
        "minitx/training/sharding.py:by_number",
        'enumerate(_parameters_of(state["param_groups"]))',
        'enumerate(sorted(_parameters_of(state["param_groups"])))',
    ),
)


# --- the draw

SKIPPED = {
    "nn/masks.py:97:24: torch.as_tensor(verdict, device=rows.device) -> torch.as_tensor(verdict)": "the same on the CPU",
    "generation/sampler.py:137:31: -1 -> 1": "the last of two axes has both numbers",
    "nn/attention.py:259:24: 0 -> 1": "rotary scores depend on differences of positions alone",
}
"""Mutants of the draw that nobody can notice, and why. The next one of the draw takes the place."""


@dataclass(frozen=True)
class Drawn:
    """A mutant of ``mutants.py`` as a fault. ``number`` counts the mutants of the file."""

    name: str
    file: str
    scope: str
    number: int
    texts: tuple[str, str]
    state: str  # of the file

    def code(self) -> CodeType:
        return next(mutant.code for mutant in mutants_of(self.file, self.number) if mutant.code is not None)


def mutants_of(path: str, number: int = -1) -> list[Any]:
    """The mutants of a file. Only that of the ``number`` has code: to compile all of them takes minutes."""
    numbers = itertools.count()
    machinery.compile = lambda *args: compile(*args) if next(numbers) == number else None  # type: ignore[attr-defined]
    try:
        return machinery.mutants(path)
    finally:
        del machinery.compile  # type: ignore[attr-defined]


def drawn(seed: int, each: int = 5) -> list[Drawn]:
    """``each`` mutants of every package: a file by its number of lines, then one of its mutants.

    They are kept. A fault of a file that has changed since is looked up by its texts; where these are gone, the next one is drawn.
    """
    kept = WORK / f"drawn_{seed}.json"
    known = json.loads(kept.read_text()) if kept.exists() else []
    found = [again for one in known if (again := _found_again(Drawn(**{**one, "texts": tuple(one["texts"])})))]
    chosen = {fault.name: fault for fault in found if fault.name not in SKIPPED}
    for package in PACKAGES:
        draw = random.Random(f"{seed} {package}")
        files = sorted(path for path in (ROOT / "minitx" / package).rglob("*.py") if path.name != "__init__.py")
        sizes = [len(path.read_text().splitlines()) for path in files]
        while sum(name.startswith(f"{package}/") for name in chosen) < each:
            path = draw.choices(files, sizes)[0].relative_to(ROOT).as_posix()
            every = mutants_of(path)
            number = draw.randrange(len(every))
            mutant = every[number]
            name = mutant.name.removeprefix("minitx/")
            is_new = (path, number) not in {(fault.file, fault.number) for fault in chosen.values()}  # kept names are old
            if mutant.scope and name not in SKIPPED and is_new:
                chosen[name] = Drawn(name, path, mutant.scope, number, (mutant.before, mutant.after), _state(path))
    kept.write_text(json.dumps([asdict(fault) for fault in chosen.values()], indent=1, ensure_ascii=False) + "\n")
    return list(chosen.values())


def _state(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16]


def _found_again(fault: Drawn) -> Drawn | None:
    """The same mutant, by its function and texts, in the file as it is now, or None if there is none."""
    if fault.state == _state(fault.file):
        return fault
    alike = [
        number
        for number, mutant in enumerate(mutants_of(fault.file))
        if (mutant.scope, mutant.before, mutant.after) == (fault.scope, *fault.texts)
    ]
    nearest = min(alike, key=lambda number: abs(number - fault.number), default=None)
    return None if nearest is None else replace(fault, number=nearest, state=_state(fault.file))


# --- a fault in a process

SITE = '''"""Imports the changed code of one module: MINITX_SEEDED_FAULT is FILE=CODE, with the code as marshal writes it."""

import os
from importlib.machinery import SourceFileLoader

_file, _, _code = os.environ.get("MINITX_SEEDED_FAULT", "").partition("=")
if _file:
    _unchanged = SourceFileLoader.get_code

    def _get_code(self, name):
        if os.path.realpath(self.path) != _file:
            return _unchanged(self, name)
        import marshal

        with open(_code, "rb") as file:
            return marshal.load(file)

    SourceFileLoader.get_code = _get_code
'''


def plant(fault: Fault | Drawn) -> None:
    """Exchange the code of the function in this process, and let the processes that it starts import the faulty module."""
    changed = fault.code()
    [new] = [code for code in _codes(changed) if code.co_qualname == fault.scope]
    places = [
        thing
        for thing in gc.get_objects()
        if type(thing) is FunctionType and thing.__code__.co_filename == new.co_filename
        if thing.__code__.co_qualname == fault.scope
    ]
    if not places and fault.file.removesuffix(".py").replace("/", ".") in sys.modules:
        raise ValueError(f"{fault.name}: there is no function {fault.scope}")
    for place in places:
        place.__code__ = new
    site, code = WORK / "site", WORK / f"{os.getpid()}.code"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    code.write_bytes(marshal.dumps(changed))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    os.environ["MINITX_SEEDED_FAULT"] = f"{ROOT / fault.file}={code}"
    exec(compile(SITE, "sitecustomize.py", "exec"), {})  # for what is not imported yet


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def forked(work: Callable[[], Any], log: Path, limit: int) -> dict[str, Any]:
    """Run ``work`` in a fork, with its output in ``log``: what it returns, as ``found``, and the seconds of the processor.

    ``limit`` is in seconds of the processor. After ten times as many by the clock, processes wait for each other for ever.
    """
    answer, start = log.with_suffix(".json"), time.monotonic()
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            found = work()
            used = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            answer.write_text(json.dumps({"found": found, "seconds": round(used)}))
        os._exit(0)
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() - start < 10 * limit:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what it has started
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    (WORK / f"{pid}.code").unlink(missing_ok=True)
    return json.loads(answer.read_text()) if answer.exists() else {"found": [], "limit": limit}


# --- the judges

SUITE = {
    "nn": ("nn/test_models", "nn/test_every_model", "nn/test_attention", "nn/test_cache"),
    "nn/attention": ("nn/test_attention", "nn/test_cache", "nn/test_every_model", "nn/test_drop_in"),
    "nn/backends": ("nn/test_chunked", "nn/test_backends", "nn/test_functional", "nn/test_flex", "nn/test_attention"),
    "nn/cache": ("nn/test_cache", "nn/test_every_model", "test_generation"),
    "nn/functional": ("nn/test_functional", "nn/test_backends", "nn/test_chunked"),
    "nn/masks": ("nn/test_masks", "nn/test_functional", "nn/test_backends", "nn/test_cache", "nn/test_scale"),
    "nn/positions": ("nn/test_positions", "nn/test_models", "nn/test_every_model", "nn/test_cache"),
    "nn/scale": ("nn/test_scale",),
    "nn/folding": ("nn/test_fold_scale", "interop/test_lora"),
    "training": ("training/test_steps", "training/test_resume", "training/test_parts", "training/test_outcome"),
    "training/module": ("training/test_module", "training/test_steps", "training/test_resume", "training/test_resume_optimizers",
                        "training/test_parts", "training/test_devices"),
    "training/checkpoint_callbacks": ("training/test_steps", "training/test_samples", "training/test_resume", "training/test_outcome"),
    "training/stop_at_value": ("training/test_steps", "training/test_resume"),
    "training/run": ("training/test_steps", "training/test_outcome", "training/test_parts", "training/test_foreign"),
    "analysis": ("analysis/test_capture", "analysis/test_intervene", "analysis/test_adopted"),
    "interop": ("interop/test_adopt", "nn/test_fold_scale", "interop/test_lora"),
    "interop/lora": ("interop/test_lora",),
    "interop/finetune": ("interop/test_lora", "cli/test_finetune", "training/test_huggingface"),
    "interop/weights": ("interop/test_folder", "cli/test_export"),
    "generation": ("test_generation", "cli/test_generate", "training/test_samples"),
    "data": ("data/test_addressing", "data/test_task", "data/test_data_module", "data/test_task_loading", "training/test_module"),
    "data/documents": ("data/test_documents", "data/test_streaming"),
    "data/translation": ("data/test_translation", "data/test_tables"),
}  # fmt: skip
"""The quick tests of a module, beside those of its name; the longest entry that its path begins with."""

CHOICE = ["-p", "no:cacheprovider", "-n", "0", "-q", "-m", "not slow and not release and not long"]


def tests_of(file: str) -> list[str]:
    """The files of quick tests that are about a module."""
    path = file.removeprefix("minitx/").removesuffix(".py")
    stem = Path(path).stem
    own = sorted(found.relative_to(ROOT).as_posix() for found in (ROOT / "tests").rglob(f"test_{stem}.py"))
    key = max((key for key in SUITE if path == key or path.startswith(f"{key}/")), key=len)
    return list(dict.fromkeys([*own, *(f"tests/{name}.py" for name in SUITE[key])]))


class Suite:
    """A plugin of pytest: instead of running the tests once, runs those of each fault to the first failure."""

    def __init__(self, faults: Sequence[Fault | Drawn]) -> None:
        self.faults, self.failed = faults, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        session.config.pluginmanager.unregister(name="terminalreporter")  # its dots would stand before the answers
        gc.unfreeze()  # tests/conftest.py freezes what there is after the collection, and frozen objects are not listed
        by_file: dict[str, list[Any]] = {}
        for item in session.items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
        for fault in self.faults:
            items = [item for file in tests_of(fault.file) for item in by_file.get(file, ())]
            items = sorted(items, key=partial(_order, fault))
            found = forked(partial(self.ask, fault, items), log_of("suite", fault), LIMITS["suite"])
            if found["found"]:  # the clean control
                [failing] = [item for item in items if item.nodeid == found["found"][0]]
                if forked(partial(self.ask, None, [failing]), log_of("clean", fault), LIMITS["suite"])["found"]:
                    found["found"], found["unclean"] = [], found["found"]
            note("suite", fault, found)
        return True

    def ask(self, fault: Fault | Drawn | None, items: list[Any]) -> list[str]:
        """The first test that fails."""
        if fault is not None:
            plant(fault)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                break
        return self.failed


NAMED = {
    "chunked_dropout_half": "test_dropout_is_replayed|test_dropout_follows|test_chunked",
    "chunked_softcap_bias": "equal_the_float64_loops.*soft|gradient_of_a_low|loss_and_all_gradients",
    "sdpa_scale_zero": "test_scale.py::test_every_word.*sdpa|test_scale.py",
    "grouped_mask_per_head": "equal_the_float64_loops.*head",
    "documents_cache": "test_packed_documents_decode",
    "cross_cache_norm": "test_decoding_with_a_cache|an_encoder_decoder",
    "cache_window_pieces": "test_decoding_with_a_cache|a_layer_with_a_window",
    "cache_padding": "test_decoding_with_a_cache|a_key_mask_may_begin|left_padded",
    "packed_padding_positions": "positions_count_real|packed_documents",
    "log_length_cache_padding": "real_key_counts|test_decoding_with_a_cache|left_padded",
    "checkpointing_dropout": "checkpointing_gives",
    "capture_deepcopy": "copy_made_inside|test_adopted|test_capture",
    "fold_lora": "no_plain_linear",
    "release_after_fold": "folding_the_scale_keeps",
    "adopted_autocast": "autocast|dtype",
    "intervene_values_grouped": "the_same_in_place|other_run_bit",
    "lora_tied": "exported_folder_has",
    "beam_rows": "narrow_beam|beam",
    "chunk_tokens_smoothing": "chunked_loss_and_its_gradients",
    "accumulate_counts": "every_split|num_targets|micro|test_addressing|several_processes|every_batch",
    "record_first_step": "nonfinite|not_finite|record|read_off_the_last_step",
    "resume_accumulate_rate": "rates_of_the_longer|never_stopped",
    "crash_after_save": "drops_what_came_after|crash",
    "stop_at_resume": "window_goes_on",
    "samples_stop_at": "writes_its_texts_once|run_that_is_over",
    "best_resume": "best_checkpoint_of_a_resumed",
    "stream_workers_accumulate": "a_resumed_stream|share_the_documents",
    "ema_test_best": "averaged",
    "ddp_gradient": "every_split|several_processes",
    "fsdp_groups": "goes_on_elsewhere|by_number|shard",
}
"""The names of tests (a regular expression) that should notice a written fault: these are asked first."""


def _order(fault: Fault | Drawn, item: Any) -> int:
    """The place of a test among those that are asked about a fault."""
    if fault.name in NAMED:
        return next((i for i, named in enumerate(NAMED[fault.name].split("|")) if re.search(named, item.nodeid)), 99)
    words = set(re.findall("[a-z]{4,}", fault.scope.lower()))
    return -sum(word in item.nodeid.lower() for word in words)


def ask_suite(faults: Sequence[Fault | Drawn]) -> None:
    """Ask the quick tests about each fault."""
    files = {file for fault in faults for file in tests_of(fault.file)}
    pytest.main([*sorted(files), *CHOICE], plugins=[Suite(faults)])


def ask_lattice(name: str, faults: Sequence[Fault | Drawn]) -> None:
    """Ask the points of a lattice about each fault: first those with the values that the fault is about, costly ones last."""
    for found in pkgutil.walk_packages([str(ROOT / "minitx")], "minitx."):
        importlib.import_module(found.name)  # a fork then imports nothing
    module: Any = importlib.import_module(f"tests.lattice.{name}")
    [lattice] = [value for value in vars(module).values() if isinstance(value, Lattice)]
    seed, costly = DRAWS[name]
    kinds: list[dict[str, str]] = [] if name == "runs" else [{}]
    kinds += [{"backend": backend} for backend in ("sdpa", "chunked") if name == "calls"]
    pairs = [point for fixed in kinds for point in lattice.pairs(**fixed)]
    every = {lattice.words(point): point for point in (*pairs, *lattice.points(seed))}
    for fault in faults:
        where = values_for(fault).get(name, {})
        replace(lattice, oracles=[*lattice.oracles, Oracle(plant, [where])])  # raises where it has no such value
        words = [*every]
        random.Random(fault.name).shuffle(words)
        words.sort(key=partial(_place, lattice, where, costly, every))
        about = [word for word in words if matches(where, every[word]) and lattice.serves(every[word])] if where else []
        unclean: list[str] = []
        while True:
            points = [every[word] for word in words]
            found = forked(partial(ask_points, module, lattice, points, fault), log_of(name, fault), LIMITS[name])
            if not found["found"]:
                break
            again, oracle = found["found"][:2]
            control = partial(ask_points, module, lattice, [every[again]], None, oracle)
            if not forked(control, log_of("clean", fault), LIMITS[name])["found"]:
                break
            unclean.append(again)
            words = words[words.index(again) + 1 :]
        note(name, fault, {**found, "about": len(about), "unclean": unclean})


DRAWS: dict[str, tuple[int, Sequence[Where]]] = {
    "calls": (0, [{"around": "compile_eager|compile_aot_eager"}]),
    "models": (61, [{"wrapper": "lora|quantised|compile|inductor|ddp|fsdp"}]),
    "runs": (0, [{"place": "ddp_cpu|ddp_unused|fsdp"}, {"compile": "yes"}]),
}
"""Of a lattice: the seed of the suite, and values that take longer."""


def _place(
    lattice: Lattice, where: Where, costly: Sequence[Where], every: dict[str, Point], words: str
) -> tuple[bool, bool, bool]:
    point = every[words]
    is_costly = any(matches(each, point) for each in costly)
    return not (where and matches(where, point)), not lattice.serves(point), is_costly


def ask_points(
    module: Any, lattice: Lattice, points: Sequence[Point], fault: Fault | Drawn | None, oracle: str | None = None
) -> list[str]:
    """The first point that fails, the oracle that fails there, and the message."""
    warnings.simplefilter("ignore")
    if fault is not None:
        plant(fault)
    with getattr(module, "process_group", contextlib.nullcontext)():
        for point in points:
            print(lattice.words(point), flush=True)
            for failure in lattice.failures(point, None if oracle in (None, "table") else [oracle]):
                return [lattice.words(point), failure.oracle, failure.message]
    return []


ABOUT: dict[str, dict[str, Where]] = {
    "chunked_dropout_half": {"calls": {"backend": "chunked|auto", "dropout": ".3", "dtype": "bf16"}},
    "chunked_softcap_bias": {"calls": {"backend": "chunked|auto", "softcap": "1.5", "bias": "learned|row|rule|slopes|t5"}},
    "sdpa_scale_zero": {"calls": {"backend": "sdpa|auto", "scale": "0"}},
    "grouped_mask_per_head": {"calls": {"heads": "!4/4", "mask": "cells|empty|blocks|padding_and_cells|many"}},
    "documents_cache": {"calls": {"mask": "documents|window_and_documents", "shape": "!5x5"}, "models": {"rows": "documents"}},
    "cross_cache_norm": {"models": {"model": "vaswani|typed_pair|deep_target", "mode": "eval"}},
    "cache_window_pieces": {"models": {"change": "window", "mode": "eval"}},
    "cache_padding": {"models": {"rows": "left|inside|right", "mode": "eval"}},
    "packed_padding_positions": {"models": {"rows": "padded_documents", "mode": "eval"}},
    "log_length_cache_padding": {"models": {"model": "log_length", "rows": "left|inside|right", "mode": "eval"}},
    "checkpointing_dropout": {"models": {"checkpointing": "yes", "mode": "train"}},
    "capture_deepcopy": {"models": {"mode": "eval", "wrapper": "none"}},
    "fold_lora": {"models": {"wrapper": "quantised", "mode": "eval"}},
    "release_after_fold": {
        "models": {"model": "hf_gpt2|hf_llama|hf_gemma2|hf_bert|hf_t5", "mode": "eval", "precision": "f64|f32"}
    },
    "adopted_autocast": {"models": {"model": "hf_llama|hf_gemma2|hf_per_head|hf_gpt_oss", "precision": "autocast"}},
    "intervene_values_grouped": {"models": {"model": "hf_llama|hf_gemma2", "look": "values", "mode": "eval"}},
    "lora_tied": {"models": {"wrapper": "lora", "mode": "eval", "look": "nothing"}},
    "beam_rows": {"models": {"rows": "plain|left", "mode": "eval", "precision": "f64|f32", "wrapper": "none"}},
    "chunk_tokens_smoothing": {"runs": {"objective": "smoothed_chunked"}},
    "accumulate_counts": {"runs": {"accumulate": "2|3", "data": "padded|masked|pairs|chat"}},
    "record_first_step": {"runs": {"ends": "nonfinite"}},
    "resume_accumulate_rate": {"runs": {"accumulate": "2|3", "schedule": "cosine", "place": "one"}},
    "crash_after_save": {"runs": {"ends": "crash_after", "place": "one"}},
    "stop_at_resume": {"runs": {"ends": "stop_at", "place": "one"}},
    "samples_stop_at": {"runs": {"asked": "samples", "ends": "stop_at", "place": "one"}},
    "best_resume": {"runs": {"place": "one", "ends": "crash_after|term|int"}},
    "stream_workers_accumulate": {"runs": {"data": "stream", "workers": "2", "accumulate": "2|3"}},
    "ema_test_best": {"runs": {"asked": "ema_tested", "data": "pairs"}},
    "ddp_gradient": {"runs": {"place": "ddp_cpu", "optimizer": "sgd|SGD"}},
    "fsdp_groups": {"runs": {"place": "fsdp", "rules": "factor", "optimizer": "adamw"}},
}
"""The values that a written fault is about, by lattice. A point that has them is asked before the others."""

ABOUT_FILES: dict[str, dict[str, Where]] = {
    "minitx/analysis/film.py": {"runs": {"asked": "film"}},
    "minitx/data/documents.py": {"runs": {"data": "stream|packed|padded"}},
    "minitx/data/translation.py": {"runs": {"data": "pairs"}},
    "minitx/generation/": {"models": {"mode": "eval", "rows": "plain|left", "precision": "f64|f32", "wrapper": "none"}},
    "minitx/interop/": {
        "models": {"model": "gpt|bert|t5|hf_gpt2|hf_gemma2|hf_bert|hf_t5", "mode": "eval", "precision": "f32"},
        "runs": {"network": "hf|lora"},
    },
    "minitx/training/net.py": {"runs": {"network": "own|hf|lora"}},
    "minitx/nn/backends/chunked.py": {"calls": {"backend": "chunked"}, "models": {"backend": "chunked"}},
}
"""The same for a drawn fault, by the beginning of its file."""


def values_for(fault: Fault | Drawn) -> dict[str, Where]:
    """The values of points that a fault is about, by lattice."""
    if fault.name in ABOUT:
        return ABOUT[fault.name]
    return next((where for file, where in ABOUT_FILES.items() if fault.file.startswith(file)), {})


# --- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judges", nargs="*", help="the judges to run: suite, calls, models, runs")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", nargs="*", help="words in the names of faults, which are asked again")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    faults: list[Fault | Drawn] = [*WRITTEN, *drawn(options.seed)]
    print(f"{len(WRITTEN)} faults are written, {len(faults) - len(WRITTEN)} are drawn by the seed {options.seed}")
    if options.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.file}: {fault.scope}")
        return
    known = results()
    for judge in options.judges:
        if options.only is None:
            chosen = [fault for fault in faults if judge not in known.get(fault.name, {})]
        else:
            chosen = [fault for fault in faults if any(word in fault.name for word in options.only)]
        if judge == "suite":
            ask_suite(chosen)
        else:
            ask_lattice(judge, [fault for fault in chosen if judge in lattices_of(fault)])
    table(faults, results())


def lattices_of(fault: Fault | Drawn) -> tuple[str, ...]:
    """The lattices that can notice a fault, the quickest first."""
    package = fault.file.split("/")[1]
    if values_for(fault):
        return tuple(values_for(fault))
    if Path(fault.file).stem in ("bias", "functional", "masks") or "backends" in fault.file:
        return "calls", "models"
    return ("runs",) if package in ("training", "data") else ("models", "runs") if package == "generation" else ("models",)


def log_of(judge: str, fault: Fault | Drawn) -> Path:
    return WORK / f"{judge}_{re.sub('[^a-z0-9]+', '_', fault.name.lower())[:60]}.log"


def note(judge: str, fault: Fault | Drawn, found: dict[str, Any]) -> None:
    """Keep an answer, beside those that other processes keep meanwhile."""
    known = results()
    known.setdefault(fault.name, {})[judge] = found
    new = WORK / f"{judge}.new"
    new.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    new.replace(WORK / "results.json")
    more = " ".join(f"{name}={value}" for name, value in found.items() if name != "found")
    print(f"{fault.name[:40]:40} {judge:7} {' '.join(found['found'][:2]) or '-'}  ({more})", flush=True)


def table(faults: Sequence[Fault | Drawn], known: dict[str, Any]) -> None:
    """Print who notices each fault: the suite, the lattices, both, none."""
    for kind, chosen in {"written": faults[: len(WRITTEN)], "drawn": faults[len(WRITTEN) :]}.items():
        counts = Counter[str]()
        print(f"\n{kind}")
        for fault in chosen:
            answers = known.get(fault.name, {})
            suite = answers.get("suite", {}).get("found", [])
            lattice = next(
                ([judge, *found["found"]] for judge, found in answers.items() if judge != "suite" and found["found"]), []
            )
            who = "both" if suite and lattice else "suite" if suite else "lattice" if lattice else "none"
            counts[who] += 1
            print(f"{fault.name[:60]:60} {who:8} {' '.join(suite[:1]) or '-'} | {': '.join(lattice[:3]) or '-'}")
        print(", ".join(f"{who} {count}" for who, count in counts.items()))


def results() -> dict[str, Any]:
    path = WORK / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
