"""Sixty seeded faults: what the suite notices, what the lattices notice.

    python tests/tools/seeded_faults.py --list                  # the faults, with the places that they change
    python tests/tools/seeded_faults.py --cover                 # once: which quick tests execute which lines
    python tests/tools/seeded_faults.py suite                   # every fault that has no result yet, against the quick tests
    python tests/tools/seeded_faults.py calls models runs       # the same against the lattices
    python tests/tools/seeded_faults.py calls --only fold_lora  # one fault, again
    python tests/tools/seeded_faults.py --table                 # the results

Thirty faults are drawn by a seed from all changes of ``mutants.py`` to nn, training, analysis, interop, generation and data. Thirty are
written (``WRITTEN``): mistakes that people make where two options meet. They were written before the lattices were read.

No file is changed. For each fault a process forks, and imports the changed code of one module in the place of its own; so do the
processes that it starts. The judge then runs to the first failure: of the suite the quick tests that execute the changed lines, of a
lattice the points of its quick tests, then the points of its slow tests. The clean control is the same without a fault; a test or a
point that fails there notices nothing. What is known is kept in ``build/seeded/results.json``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import marshal
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import mutants as machinery
from mutants import ROOT

WORK = ROOT / "build/seeded"
SEED = 61
PACKAGES = ("nn", "training", "analysis", "interop", "generation", "data")
LATTICES = ("calls", "models", "runs")
LIMITS = {"suite": 120, "calls": 300, "models": 600, "runs": 900}
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

    def code(self) -> CodeType:
        """The code of the changed module.

        Raises:
            ValueError: ``before`` does not stand exactly once in the function.
        """
        source, scope = (ROOT / self.file).read_text(), self.place.partition(":")[2]
        lines = source.splitlines(keepends=True)
        first, last = _extent(ast.parse(source), scope)
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
        "minitx/nn/attention.py:MultiHeadAttention._project",
        "return q if self.qk_norm is None else self.qk_norm(q, None)[0], *cache.memory",
        "return q, *cache.memory",
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
        "minitx/analysis/capture.py:Hook.__reduce__",
        "return Hook, ()",
        "return Hook, (self.run,)",
    ),
    Fault(
        "fold_lora",
        "fold_scale × LoRA, quantised or parametrised projections: folded instead of refused",
        "minitx/nn/scale.py:_why_not_fold",
        "{', '.join(faults)}\": bool(faults),",
        "{', '.join(faults)}\": False,",
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
        "minitx/interop/adopt.py:_attention",
        "query, key = query.to(value), key[:, :, :S].to(value)",
        "key = key[:, :, :S].to(value)",
    ),
    Fault(
        "intervene_values_grouped",
        "intervene on values × grouped heads: the keys go to other heads",
        "minitx/analysis/intervene.py:_Part.enter",
        "(tensor.repeat_interleave(group, dim=1) for tensor in (call.key, call.value))",
        "(tensor.repeat(1, group, 1, 1) for tensor in (call.key, call.value))",
    ),
    Fault(
        "lora_tied",
        "LoRA × tied embeddings: the merge of one changes the other",
        "minitx/interop/finetune.py:merged",
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
        "minitx/training/run.py:fit",
        "return error.step + 1",
        "return error.step",
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
        "minitx/training/loggers.py:MetricsFile._begin",
        'if row["step"] <= start_step]',
        'if row["step"] < start_step]',
    ),
    Fault(
        "stop_at_resume",
        "stop_at × resume: the window of the metric begins anew",
        "minitx/training/callbacks.py:StopAt.load_state_dict",
        'state_dict["reached"], list(state_dict["last"])',
        'state_dict["reached"], []',
    ),
    Fault(
        "samples_stop_at",
        "samples × stop_at × resume: a run that goes on after its end writes its last samples again",
        "minitx/training/callbacks.py:Samples.on_train_start",
        "self._written = trainer.global_step",
        "self._written = 0",
    ),
    Fault(
        "best_resume",
        "monitor × resume: a worse validation replaces best.ckpt",
        "minitx/training/callbacks.py:BestCheckpoint.load_state_dict",
        'super().load_state_dict({**state_dict, **score, "dirpath": self.dirpath, "best_model_path": str(here)})',
        "self.best_model_path = str(here)",
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
        "callback._average_model = None",
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
        "minitx/training/module.py:by_number",
        'enumerate(_parameters(state["param_groups"]))',
        'enumerate(sorted(_parameters(state["param_groups"])))',
    ),
)


# --- the draw

SKIPPED = {
    "nn/masks.py:89:24: torch.as_tensor(verdict, device=rows.device) -> torch.as_tensor(verdict)": "the same on the CPU",
    "training/optimizers.py:135:24: 1 -> 2": "neither -1 nor -2 is the number of a rule",
    "generation/sampler.py:132:31: -1 -> 1": "the last of two axes has both numbers",
}
"""Mutants of the draw that nobody can notice, and why. The next one of the draw takes the place."""


@dataclass(frozen=True)
class Drawn:
    """A mutant of ``mutants.py`` as a fault. ``number`` is its number among those of the file."""

    name: str
    file: str
    line: str
    number: int
    texts: tuple[str, str]

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

    They are kept. A fault of a file that has changed since is looked up by its texts.
    """
    kept = WORK / f"drawn_{seed}.json"
    if kept.exists():
        found = [Drawn(**{**one, "texts": tuple(one["texts"])}) for one in json.loads(kept.read_text())]
        return [_found_again(one) for one in found if one.name not in SKIPPED]
    found = []
    for package in PACKAGES:
        draw, chosen = random.Random(f"{seed} {package}"), dict[str, Drawn]()
        files = sorted(path for path in (ROOT / "minitx" / package).rglob("*.py") if path.name != "__init__.py")
        sizes = [len(path.read_text().splitlines()) for path in files]
        while len(chosen) < each:
            path = draw.choices(files, sizes)[0].relative_to(ROOT).as_posix()
            every = mutants_of(path)
            number = draw.randrange(len(every))
            mutant = every[number]
            name = mutant.name.removeprefix("minitx/")
            if mutant.scope and name not in SKIPPED:
                chosen[name] = Drawn(name, path, f"in {mutant.scope}", number, (mutant.before, mutant.after))
        found += chosen.values()
    kept.write_text(json.dumps([asdict(one) for one in found], indent=1, ensure_ascii=False) + "\n")
    return found


def _found_again(fault: Drawn) -> Drawn:
    """The same mutant, by its function and texts, in the file as it is now."""
    alike = [
        number
        for number, mutant in enumerate(mutants_of(fault.file))
        if (f"in {mutant.scope}", (mutant.before, mutant.after)) == (fault.line, fault.texts)
    ]
    return replace(fault, number=min(alike, key=lambda number: abs(number - fault.number)))


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


def plant(fault: Fault | Drawn | None) -> None:
    """Let this process, and those that it starts, import the faulty module. None: the clean control."""
    site = WORK / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    if fault is not None:
        code = WORK / f"{os.getpid()}.code"
        code.write_bytes(marshal.dumps(fault.code()))
        os.environ["MINITX_SEEDED_FAULT"] = f"{ROOT / fault.file}={code}"
        exec(compile(SITE, "sitecustomize.py", "exec"), {})


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
    "nn/scale": ("nn/test_scale", "nn/test_fold_scale", "interop/test_lora"),
    "training": ("training/test_steps", "training/test_resume", "training/test_parts", "training/test_outcome"),
    "training/module": ("training/test_module", "training/test_steps", "training/test_resume", "training/test_resume_optimizers",
                        "training/test_parts", "training/test_devices"),
    "training/callbacks": ("training/test_steps", "training/test_samples", "training/test_resume", "training/test_outcome"),
    "training/run": ("training/test_steps", "training/test_outcome", "training/test_parts", "cli/test_trainer_arguments"),
    "analysis": ("analysis/test_capture", "analysis/test_adopted", "analysis/test_intervene"),
    "interop": ("interop/test_adopt", "nn/test_fold_scale", "interop/test_lora"),
    "interop/finetune": ("interop/test_lora", "cli/test_finetune", "training/test_huggingface"),
    "interop/weights": ("interop/test_folder", "cli/test_export"),
    "generation": ("test_generation", "cli/test_generate", "training/test_samples"),
    "data": ("data/test_addressing", "data/test_task", "data/test_data_module", "data/test_loaders"),
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


class Failures:
    """A plugin of pytest that keeps the names of the tests that fail."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def ask_suite(fault: Fault | Drawn | None, files: Sequence[str], clean: Sequence[str] = ()) -> list[str]:
    """The first test that fails, beside those that fail without a fault; without a fault all that fail."""
    import pytest

    plant(fault)
    failures = Failures()
    stop = ["-x"] if fault else []
    pytest.main([*files, *CHOICE, *stop, *(f"--deselect={name}" for name in clean)], plugins=[failures])
    return failures.names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judges", nargs="*", help="who is asked: suite, calls, models, runs")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", nargs="*", help="words in the names of faults, which are asked again")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    faults: list[Fault | Drawn] = [*WRITTEN, *drawn(options.seed)]
    print(f"{len(WRITTEN)} faults are written, {len(faults) - len(WRITTEN)} are drawn by the seed {options.seed}")
    if options.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.line}")
        return
    known = results()
    if options.judges:
        import lightning.pytorch  # noqa: F401
        import pytest  # noqa: F401
        import torch
        import transformers  # noqa: F401

        torch.set_num_threads(1)  # a fork has none of its parent's threads
    for judge in options.judges:
        for fault in faults:
            again = options.only is not None and any(word in fault.name for word in options.only)
            if again or (options.only is None and judge not in known.get(fault.name, {})):
                ask(judge, fault, known)
    table(faults, known)


def ask(judge: str, fault: Fault | Drawn, known: dict[str, Any]) -> None:
    """Ask a judge about a fault, and keep the answer."""
    log = WORK / f"{judge}_{re.sub('[^a-z0-9]+', '_', fault.name.lower())[:60]}.log"
    if judge == "suite":
        files = tests_of(fault.file)
        for file in files:
            if file not in known.setdefault("clean", {}):
                known["clean"][file] = forked(partial(ask_suite, None, [file]), WORK / "clean.log", 600)["found"]
                keep(known)
        clean = [name for file in files for name in known["clean"][file]]
        found = forked(partial(ask_suite, fault, files, clean), log, LIMITS[judge])
    known.setdefault(fault.name, {})[judge] = found
    keep(known)
    print(f"{fault.name:40} {judge:7} {' '.join(found['found'][:1]) or '-'}", flush=True)


def table(faults: Sequence[Fault | Drawn], known: dict[str, Any]) -> None:
    """Print who notices each fault."""


def results() -> dict[str, Any]:
    path = WORK / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(found: dict[str, Any]) -> None:
    new = WORK / "results.new"
    new.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    new.replace(WORK / "results.json")


if __name__ == "__main__":
    main()
