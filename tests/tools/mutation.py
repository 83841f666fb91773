"""Do the tests notice a fault? One small change to the source at a time, and the tests that execute the changed line.

    python tests/tools/mutation.py                    # make mutation: all files (an hour on one core without the slow tests), resumable
    python tests/tools/mutation.py masks chunked      # only these files
    python tests/tools/mutation.py --sample 60        # at most 60 mutants of each file, drawn by a fixed seed; a larger sample holds a smaller
    python tests/tools/mutation.py --again            # only those that survived, after tests were added
    python tests/tools/mutation.py --record           # counts and survivors into benchmarks/results/mutation.json

What is changed: ``mutants.py``. No file is written: a process that has collected the tests forks once a mutant, exchanges the code of
one function, and runs the tests that execute the line, quick ones first, to the first failure. What runs at import (defaults,
constants, class attributes) is forked before the collection and imported changed. What is known of the survivors: ``docs/dev/testing.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import os
import pickle
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from random import Random
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch  # imported here, once, and not in every fork
from mutants import ROOT, Mutant, mutants

WORK = ROOT / "build/mutation.json"  # what became of each mutant so far
CALLS = [
    "tests/lattice/test_call_lattice.py::test_a_call_keeps_every_promise",
    "tests/nn/test_bad_inputs.py",
    "tests/check/test_strict.py",
]
NN = [*CALLS, *(f"tests/nn/test_{name}.py" for name in (
    "functional", "masks", "backends", "chunked", "flex", "attention", "bias", "cache", "scale", "drop_in"))]  # fmt: skip
ADOPT, ADOPTED, CAPTURE = (
    f"tests/{name}.py::test_" for name in ("interop/test_adopt", "analysis/test_adopted", "analysis/test_capture")
)
TESTS = {
    "minitx/nn/functional.py": [*CALLS[:2], "tests/nn/test_functional.py"],
    **{f"minitx/nn/{name}.py": NN for name in ("masks", "bias")},
    **{f"minitx/nn/backends/{name}.py": NN for name in ("__init__", "chunked", "flex", "sdpa")},
    "minitx/ablation/judge.py": ["tests/ablation/test_judge.py"],
    "minitx/data/batches.py": [f"tests/data/test_{name}.py" for name in ("addressing", "task", "data_module")],
    "minitx/training/objectives.py": ["tests/training/test_objectives.py"],
    "minitx/analysis/gradients.py": [
        "tests/analysis/test_gradients.py",
        f"{CAPTURE}gradients_of_a_core_that_runs_several_times_count_the_queries_of_every_call",
        f"{CAPTURE}in_a_peft_model_only_the_attention_that_runs_counts",
        f"{ADOPTED}the_probe_finds_the_matrices_of_separate_projections",
        f"{ADOPTED}gradient_statistics_of_adopted_models_have_the_projections",
    ],
    "minitx/analysis/statistics.py": ["tests/analysis/test_attention_statistics.py"],
    "minitx/check/properties.py": ["tests/check/test_properties.py"],
    "minitx/generation/decoding.py": ["tests/test_generation.py"],
    "minitx/generation/reader.py": ["tests/test_generation.py"],
    "minitx/nn/folding.py": ["tests/nn/test_fold_scale.py"],
    "minitx/interop/adopted_fold.py": [
        *(f"{ADOPT}{name}" for name in (
            "a_number_among_the_weights_of_an_attention_is_no_obstacle_to_a_fold",
            "folding_the_scale_keeps_the_function_and_release_gives_the_weights_back",
            "frozen_weights_of_a_model_in_training_mode_are_folded_in_their_own_precision",
            "weights_that_make_more_than_the_queries_are_refused_and_left_as_they_were",
            "small_weights_hide_no_wrong_fold_behind_the_rounding_of_the_answer",
            "weights_that_two_layers_or_queries_and_keys_share_are_multiplied_and_given_back_once",
            "a_layer_whose_projections_have_no_known_name_is_refused_and_left_as_it_was",
            "queries_take_the_whole_factor_where_weights_make_more_than_keys_and_a_warning_says_so",
            "a_fold_of_lora_of_a_speech_model_without_inputs_and_beside_our_attention_is_refused",
        )),
    ],
}  # fmt: skip
FILES = [*TESTS]
MORE = [f"tests/{name}.py" for name in (
    "nn/test_blocks", "nn/test_models", "nn/test_every_model", "nn/test_positions", "nn/test_fold_scale",
    "training/test_foreign", "training/test_module", "training/test_parts", "data/test_text", "data/test_streaming",
    "data/test_tokenizers", "data/test_documents", "ablation/test_intervals",
    "ablation/test_report")]  # fmt: skip
"""Tests of what calls these files: only for what survived the others."""
OWN = {"__init__": ("backends", "chunked"), "chunked": ("chunked", "backends"), "sdpa": ("backends", "flex")}  # else by name
CHOICE = ("-m", "not long", "-p", "no:cacheprovider")  # of the slow tests, too
LONGEST, BUDGET, LIMIT = 3.0, 12.0, 100.0  # seconds of the processor: of one test, of a mutant's tests together, of a fork


def forked(work: Any, limit: float) -> str:
    """killed, survived or timeout (seconds of the processor): what became of ``work`` (True = all tests pass) in a fork."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            code = 0 if work() else 1
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    return "survived" if status == 0 else "timeout" if os.WIFSIGNALED(status) else "killed"


def passes(items: list[Any]) -> bool:
    """Whether all these tests pass; stops at the first that does not."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            return False
    return True


def covered(items: list[Any], files: list[str], kept: Path) -> dict[str, Any]:
    """For each test, by name, its seconds and the lines of each file that it executes; ``kept`` holds what was found before.

    Found in a fork, so that no cache in this process is warm when the first mutant runs.
    """

    def work() -> bool:
        import coverage

        watcher = coverage.Coverage(include=[str(ROOT / path) for path in files], data_file=None, config_file=False)
        watcher.start()
        for item in new:
            watcher.switch_context(item.nodeid)
            started = time.process_time()
            assert passes([item]), item.nodeid
            known[item.nodeid] = {"seconds": time.process_time() - started, "lines": {path: [] for path in files}}
        watcher.stop()
        for path in files:
            for line, tests in watcher.get_data().contexts_by_lineno(str(ROOT / path)).items():
                for test in filter(None, tests):
                    known[test]["lines"][path].append(line)
        kept.write_bytes(pickle.dumps(known))
        return True

    known = pickle.loads(kept.read_bytes()) if kept.exists() else {}
    new = [item for item in items if item.nodeid not in known]
    assert not new or forked(work, 1200.0) == "survived", "the tests do not pass unchanged"
    return pickle.loads(kept.read_bytes())


class Run:
    """A plugin of pytest: instead of running the tests once, runs the covering ones for every mutant."""

    def __init__(self, todo: list[Mutant], note: Callable[[Mutant, str], None], kept: Path) -> None:
        self.todo, self.note, self.kept = todo, note, kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        import hypothesis  # not before pytest, which rewrites its assertions

        quick = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure is enough, it need not be small
        hypothesis.settings.register_profile("mutation", parent=hypothesis.settings.default, phases=quick, database=None)
        hypothesis.settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        session.config.pluginmanager.unregister(name="terminalreporter")  # its dots would stand before the outcomes
        items = [item for item in session.items if "compile" not in item.nodeid]
        known = covered(items, FILES, self.kept)
        functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        gc.unfreeze()  # tests/conftest.py freezes what there is after the collection, and frozen objects are not listed
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                code = thing.__code__
                functions.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(thing)
        for mutant in self.todo:
            tests = chosen(mutant, items, known)
            self.note(mutant, forked(partial(all_pass, mutant, functions, tests), LIMIT) if tests else "not executed")
        return True


def chosen(mutant: Mutant, items: list[Any], known: dict[str, Any]) -> list[Any]:
    """The tests that execute the changed line, up to ``BUDGET``: those of the same name first, quick ones before others.

    Where none is seen to, those that enter its function: torch's compiler reads an inner function instead of running it.
    """
    stem = Path(mutant.file).stem
    own = [f"test_{name}.py" for name in OWN.get(stem, (stem,))]
    entered = range(min(code.co_firstlineno for code in changed_functions(mutant)) + 1, mutant.line)
    seconds: dict[Any, float] = {}
    for lines in (set(mutant.lines), set(entered)):
        found = [item for item in items if lines & set(known[item.nodeid]["lines"][mutant.file])]
        seconds = seconds or {item: known[item.nodeid]["seconds"] for item in found}
    short = [item for item in seconds if seconds[item] < LONGEST]
    order = sorted(short, key=lambda item: (not any(name in item.nodeid for name in own), seconds[item]))
    ends = itertools.accumulate(seconds[item] for item in order)
    return [item for item, end in zip(order, ends, strict=True) if end < BUDGET]


def all_pass(mutant: Mutant, functions: dict[tuple[str, str, int], list[FunctionType]], tests: list[Any]) -> bool:
    """Whether the tests pass with the changed code in the functions that exist."""
    for code in changed_functions(mutant):
        for function in functions.get((str(ROOT / mutant.file), code.co_qualname, code.co_firstlineno), ()):
            function.__code__ = code
    return passes(tests)


def changed_functions(mutant: Mutant) -> Iterator[CodeType]:
    """The functions of the changed module with the qualified name of the changed function."""
    stack = [mutant.code]
    while stack:
        code = stack.pop()
        stack.extend(const for const in code.co_consts if isinstance(const, CodeType))
        if code.co_qualname == mutant.scope:
            yield code


def at_import(mutant: Mutant) -> bool:
    """Whether the tests pass with the module imported changed."""
    here, unchanged = str(ROOT / mutant.file), SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: mutant.code if self.path == here else unchanged(self, name)  # type: ignore
    stem = Path(mutant.file).stem
    words = (stem, *OWN.get(stem, ()), "functional", "backends", "bad_inputs")
    own = [test for test in TESTS[mutant.file] if TESTS[mutant.file] is not NN or any(word in test for word in words)]
    return pytest.main([*own, *CHOICE, "-x", "-k", "not compile"]) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="words in the paths of the files to change; none for all")
    parser.add_argument("--again", action="store_true", help="test those again that were not killed")
    parser.add_argument("--record", action="store_true", help="write down what is known, test none")
    parser.add_argument("--sample", type=int, default=sys.maxsize, help="the most mutants of a file")
    parser.add_argument("--work", type=Path, default=WORK, help="what is known so far")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    found = json.loads(chosen.work.read_text()) if chosen.work.exists() else {}
    if chosen.record:
        record(found)
        return
    paths = [path for path in FILES if not chosen.files or any(word in path for word in chosen.files)]
    every = [mutant for path in paths for mutant in sample(mutants(path), chosen.sample)]
    open_again = ("survived", "not executed") if chosen.again else ()
    todo = [mutant for mutant in every if found.get(mutant.name) in (None, *open_again)]
    print(f"{len(every)} mutants, {len(todo)} to test", flush=True)

    def note(mutant: Mutant, outcome: str) -> None:
        found[mutant.name] = outcome
        print(f"{outcome:12} {mutant.name}", flush=True)
        chosen.work.parent.mkdir(exist_ok=True)
        chosen.work.write_text(json.dumps(found, indent=0) + "\n")

    for mutant in todo:  # first: nothing of minitx is imported yet
        if not mutant.scope:
            note(mutant, forked(partial(at_import, mutant), LIMIT))
    inside = [mutant for mutant in todo if mutant.scope]
    tests = list(dict.fromkeys(test for mutant in inside for test in TESTS[mutant.file]))
    tests += MORE if chosen.again and NN in map(TESTS.get, paths) else []
    pytest.main([*tests, *paths, *CHOICE], plugins=[Run(inside, note, chosen.work.with_suffix(".covered"))])


def sample(every: list[Mutant], most: int) -> list[Mutant]:
    """The first ``most`` mutants of a file in an order drawn by a fixed seed, in the order of their lines."""
    drawn = set(Random(0).sample(range(len(every)), len(every))[:most])
    return [mutant for number, mutant in enumerate(every) if number in drawn]


def record(found: dict[str, str]) -> None:
    """Write each file's counts, and the mutants that no test noticed; a file of which nothing is known here keeps its record."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from harness import RESULTS, about, save

    of_all = about()
    files = json.loads((RESULTS / "mutation.json").read_text())["files"]
    for path in FILES:
        mine = {mutant.name: found.get(mutant.name, "not tested") for mutant in mutants(path)}
        if set(mine.values()) != {"not tested"}:
            files[path] = {
                "date": of_all["date"],
                "source": hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16],
                "counts": Counter(mine.values()),
                "alive": [name for name, outcome in mine.items() if outcome in ("survived", "not executed")],
            }
    save("mutation", {**of_all, "files": {path: files[path] for path in FILES if path in files}})


if __name__ == "__main__":
    main()
