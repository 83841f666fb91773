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
import importlib
import json
import marshal
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from mutants import ROOT, mutants

WORK = ROOT / "build/seeded"
SEED = 61
PACKAGES = ("nn", "training", "analysis", "interop", "generation", "data")
LATTICES = ("calls", "models", "runs")
CPU_SECONDS, SECONDS = {"suite": 120, "calls": 300, "models": 600, "runs": 900}, 3600
"""Of a judge: seconds of the processor by kind, and by the clock (processes that wait for each other for ever)."""


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

    def edited(self) -> tuple[str, range]:
        """The source of the changed module, and the lines that stood there.

        Raises:
            ValueError: ``before`` does not stand exactly once in the function.
        """
        source, scope = (ROOT / self.file).read_text(), self.place.partition(":")[2]
        lines = source.splitlines(keepends=True)
        first, last = _extent(ast.parse(source), scope)
        body = "".join(lines[first - 1 : last])
        if body.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {body.count(self.before)} times in {self.place}")
        start = first + body[: body.index(self.before)].count("\n")
        changed = "".join([*lines[: first - 1], body.replace(self.before, self.after), *lines[last:]])
        return changed, range(start, start + self.before.strip("\n").count("\n") + 1)

    def code(self) -> CodeType:
        return compile(self.edited()[0], str(ROOT / self.file), "exec", dont_inherit=True)

    def lines(self) -> range:
        return self.edited()[1]


@dataclass(frozen=True)
class Drawn:
    """A mutant as a fault."""

    mutant: Any

    @property
    def name(self) -> str:
        return self.mutant.name.removeprefix("minitx/")

    @property
    def line(self) -> str:
        return f"in {self.mutant.scope}"

    @property
    def file(self) -> str:
        return self.mutant.file

    @property
    def place(self) -> str:
        return f"{self.file}:{self.mutant.scope}"

    def code(self) -> CodeType:
        return self.mutant.code

    def lines(self) -> range:
        return self.mutant.lines


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

SKIPPED: dict[str, str] = {}
"""Mutants of the draw that change nothing that can be noticed, and why; the next of the draw takes the place."""


def drawn(seed: int = SEED, each: int = 5) -> list[Drawn]:
    """``each`` mutants of every package: a file by its number of lines, then one of its mutants."""
    found: list[Drawn] = []
    known: dict[str, list[Any]] = {}
    for package in PACKAGES:
        draw, chosen = random.Random(f"{seed} {package}"), dict[str, Drawn]()
        files = sorted(path for path in (ROOT / "minitx" / package).rglob("*.py") if path.name != "__init__.py")
        sizes = [len(path.read_text().splitlines()) for path in files]
        while len(chosen) < each:
            path = draw.choices(files, sizes)[0].relative_to(ROOT).as_posix()
            known.setdefault(path, mutants(path))
            fault = Drawn(draw.choice(known[path]))
            if fault.mutant.scope and fault.name not in SKIPPED:
                chosen[fault.name] = fault
        found += chosen.values()
    return found


# --- a fault in a process

SITE = '''"""Imports the changed code of one module: MINITX_SEEDED_FAULT=FILE=CODE, with the code as marshal writes it."""

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
    """Let this process, and those that it starts, import the faulty module."""
    site = WORK / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    if fault is not None:
        code = WORK / f"{os.getpid()}.code"
        code.write_bytes(marshal.dumps(fault.code()))
        os.environ["MINITX_SEEDED_FAULT"] = f"{ROOT / fault.file}={code}"
        exec(compile(SITE, "sitecustomize.py", "exec"), {})


def forked(work: Callable[[], str | None], log: Path, kind: str) -> dict[str, Any]:
    """What ``work`` returns in a fork: the name of what failed, or None. Its output goes to ``log``."""
    answer, start = log.with_suffix(".json"), time.monotonic()
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS[kind], CPU_SECONDS[kind] + 5))
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            try:
                found = work()
            except BaseException as error:
                traceback.print_exc()
                found = f"{type(error).__name__}: {str(error)[:200]}"
            answer.write_text(json.dumps({"noticed": found}))
        os._exit(0)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() - start > SECONDS:
            break
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what it has started
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    used = {"seconds": round(time.monotonic() - start)}
    return {**json.loads(answer.read_text()), **used} if answer.exists() else {"noticed": None, "limit": True, **used}


# --- the suite


class Noticing:
    """A plugin of pytest that notes the first test that fails, and how long each test takes."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.failed: list[str] = []
        self.known = known

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.known:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


CHOICE = ["-p", "no:cacheprovider", "-n", "0", "-m", "not slow and not release and not long"]
LONGEST, BUDGET = 15.0, 60.0  # seconds of the processor, when no fault is there: of one test, of a fault's tests together


def tests_of(fault: Fault | Drawn, covered: dict[str, Any]) -> list[str]:
    """The quick tests that execute a changed line: those of the module's name first, quick ones before others, up to ``BUDGET``."""
    seconds, names = covered["seconds"], list(covered["seconds"])
    by_line = covered["lines"].get(fault.file, {})
    stem = Path(fault.file).stem
    chosen = {names[i] for line in fault.lines() for i in by_line.get(str(line), ()) if seconds[names[i]] < LONGEST}
    order = sorted(chosen, key=lambda name: (f"test_{stem}" not in name, seconds[name]))
    total, kept = 0.0, []
    for name in order:
        total += seconds[name]
        if total > BUDGET:
            break
        kept.append(name)
    return kept


def ask_suite(fault: Fault | Drawn | None, tests: list[str]) -> Callable[[], str | None]:
    def work() -> str | None:
        import pytest

        plant(fault)
        plugin = Noticing()
        pytest.main([*tests, *CHOICE, *(["-x"] if fault else [])], plugins=[plugin])
        return " ".join(plugin.failed[:1]) or None if fault else json.dumps(plugin.failed)

    return work


# --- the program


def results() -> dict[str, dict[str, Any]]:
    path = WORK / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(found: dict[str, dict[str, Any]]) -> None:
    new = WORK / "results.new"
    new.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    new.replace(WORK / "results.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    options = parser.parse_args()
    if options.list:
        for fault in WRITTEN:
            print(f"{fault.name:26} {fault.line}\n{'':26} {fault.place}:{fault.lines().start}")


if __name__ == "__main__":
    main()
