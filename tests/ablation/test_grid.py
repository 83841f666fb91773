"""A grid as data: which cells, in which order, under which names; and what a config may not say."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import minitx.ablation.grid as module
from minitx.ablation import design
from minitx.ablation.design import AblationConfig, StartConfig, StudyConfig, ThresholdConfig
from minitx.ablation.grid import Cell, GridPlace, cells, code_fingerprint, named_code
from minitx.config import ConfigError

ROOT = Path(__file__).parents[2]
ARMS = {"a": ("model.scale=inv_sqrt",), "b": ("model.scale=unscaled", "optimizer.rules=[{match: '(q|k)_proj', lr: 2}]")}
INIT = {"lecun": ("model.init=lecun",), "gpt2": ("model.init=gpt2",)}
FACTORS = {"init": INIT, "lr": {"0.1": (), "1": ("optimizer.lr=1",)}}
MAIN = StudyConfig(base=("experiment=x", "trainer.max_steps=7"), arms=("a", "b"), factors=FACTORS, seeds=(5, 3, 9))
FIRST = StudyConfig(base=("trainer.max_steps=2",), arms=("a", "b"), factors={"init": INIT}, seeds=(3, 5, 9))
SECOND = dataclasses.replace(MAIN, start=StartConfig(study="first", arm="b"))
SIDE = StudyConfig(base=("experiment=y", "trainer.max_steps=2"), arms=("b",), seeds=(3, 4))
THRESHOLD = dataclasses.replace(SIDE, threshold=ThresholdConfig(first={"b": 0.1}))


def grid(**changes):
    return AblationConfig(**{"arms": ARMS, "studies": {"main": MAIN, "side": SIDE}, **changes})


def two_phases(**changes):
    return grid(studies={"second": SECOND, "first": FIRST, **changes})


def test_cells_come_in_seed_blocks_so_that_a_grid_that_is_cut_off_is_balanced():
    found = [cell.place for cell in cells(grid())]
    assert len(found) == 3 * 8 + 2
    assert [place.seed for place in found if place.study == "main"] == [5] * 8 + [3] * 8 + [9] * 8
    assert [(place.study, place.seed) for place in found[:9]] == [("main", 5)] * 8 + [("side", 3)]
    for block in (found[:8], found[9:17]):
        assert {(p.arm, *dict(p.factors).values()) for p in block} == {*itertools.product("ab", INIT, FACTORS["lr"])}


def test_overrides_come_in_the_order_in_which_later_ones_win():
    found = cells(grid(), common=["data.num_workers=0", "trainer.max_steps=3"])
    place = GridPlace("main", "b", (("init", "gpt2"), ("lr", "1")), 9)
    (cell,) = [cell for cell in found if cell.place == place]
    expected = ("experiment=x", "trainer.max_steps=7", *ARMS["b"], "model.init=gpt2", "optimizer.lr=1", "seed=9")
    assert cell.overrides == (*expected, "data.num_workers=0", "trainer.max_steps=3")
    assert cell.steps() == 3


def test_a_cell_comes_after_the_one_that_it_starts_from_which_shares_seed_and_factors():
    found = cells(two_phases())
    assert len(found) == 12 + 24
    for cell in found:
        seed, is_first = cell.place.seed, cell.place.study == "first"
        assert cell.keeps_weights == (is_first and cell.place.arm == "b")
        assert f"seed={seed if is_first else seed + 1000}" in cell.overrides  # batches that the first phase has not read
        if not is_first:
            assert cell.start.place == GridPlace("first", "b", (("init", dict(cell.place.factors)["init"]),), seed)
            assert found.index(cell.start) < found.index(cell)


def test_a_cell_of_the_second_phase_loads_the_first_one_and_checks_that_it_is_the_same_function(tmp_path):
    cell = next(cell for cell in cells(two_phases()) if cell.start)
    folder = tmp_path / "it's größer\\小"
    path = folder / "cells" / cell.start.hash / "checkpoints" / "last.ckpt"
    words = shlex.split(cell.describe(folder)["command"])
    assert words[:2] == ["python", "scripts/train.py"]
    assert words[2:-3] == list(cell.overrides)
    assert words[-3:-1] == [f'init_from.path="{path}"', "init_from.fold_scale=true"]
    assert words[-1].startswith("+callbacks.same_start=") and str(path) in words[-1]
    assert OverridesParser.create().parse_override(words[-3]).value() == str(path)
    assert cell.describe(tmp_path)["start"] == cell.start.hash


def test_the_code_of_a_target_in_the_current_folder_is_part_of_the_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def hash_with(text, target="mine.part.Layer"):
        named_code.cache_clear()
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "part.py").write_text(text)
        return Cell(GridPlace("main", "a", (), 1), (f"model.attention={{_target_: {target}}}",)).hash

    assert hash_with("x = 1") == hash_with('"""A comment."""\nx = 1') != hash_with("x = 2")
    assert hash_with("x = 1", "minitx.nn.LinearAttention") == hash_with("x = 2", "minitx.nn.LinearAttention")


def test_a_check_of_the_start_trusts_the_checkpoint_if_the_run_does(tmp_path):
    start = Cell(GridPlace("first", "a", (), 1), ("seed=1",))
    checks = [Cell(GridPlace("main", "a", (), 1), (word,), start).words(tmp_path)[-1] for word in ("trust=true", "trust=false")]
    assert ["trust: true" in check for check in checks] == [True, False]


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: grid(studies={"main": dataclasses.replace(MAIN, seeds=(1, 2, 1))}), r"studies\.main names a seed or a level twice"),
    (lambda: two_phases(first=dataclasses.replace(FIRST, seeds=(3, 5))), r"second\.start: the grid has no run first: b, init \w+, seed 9"),
    (lambda: two_phases(first=dataclasses.replace(FIRST, start=StartConfig(study="second", arm="a"), factors=FACTORS)),
     "studies: second, first start from each other"),
    (lambda: grid(arms={"a": ("optimizer.lr=1",), "b": ("+data.seed=3",)}), r"ablation\.studies\.main: arm a and factor \w+ both set"),
    (lambda: grid(arms={"a": ("seed=1",), "b": ("seed=2",)}), r"arm a and seeds both set seed"),
    (lambda: grid(arms={**ARMS, "b": ("++optimizer.lr=1",)}, studies={"one": THRESHOLD}), r"arm b and threshold both set optimizer\.lr"),
    (lambda: grid(arms={**ARMS, "b": ("model.dropout=0.1",)}), r"arm b and the command line or the lab itself both set model\.dropout"),
    (lambda: grid(studies={"one": dataclasses.replace(SIDE, seeds=())}), r"studies\.one has no run"),
    (lambda: grid(studies={"one": dataclasses.replace(SIDE, base=("trainer.max_steps=1", "seed=3"))}), r"one: base and seeds both set seed"),
    (lambda: grid(studies={"one": dataclasses.replace(SIDE, factors={"x": INIT, "y": INIT})}), r"one: factor x and factor y both set model\.init"),
])  # fmt: skip
def test_a_grid_with_a_run_or_a_key_twice_or_a_first_phase_that_is_not_there_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        cells(wrong(), common=["model.dropout=0.2"])


@pytest.mark.parametrize("word", ["model.fold_scale=true", "+init_from.fold_scale=True"])
def test_a_run_that_folds_the_scale_of_given_weights_checks_that_it_is_the_same_function(word):
    assert Cell(GridPlace("main", "a", (), 1), (word,)).words(Path("x"))[-1].startswith("+callbacks.same_start=")


def test_the_name_of_a_cell_depends_on_its_place_its_overrides_and_its_start():
    base = Cell(GridPlace("main", "a", (("lr", "1"),), 1), ("seed=1",))
    assert base.hash == dataclasses.replace(base, keeps_weights=True).hash
    places = [{"study": "z"}, {"arm": "z"}, {"seed": 2}, {"factors": (("lr", "2"),)}]
    changes = [{"place": dataclasses.replace(base.place, **place)} for place in places]
    changes += [{"overrides": ("seed=2",)}, {"start": base}, {"start": dataclasses.replace(base, overrides=("seed=2",))}]
    assert len({base.hash, *(dataclasses.replace(base, **change).hash for change in changes)}) == 1 + len(changes)


def test_the_name_of_a_cell_follows_the_users_own_configs_and_code_and_not_their_place_or_grids(tmp_path, monkeypatch):
    def name(folder, experiment, grid="seed: 0", code="x = 1"):
        files = {"conf/experiment/mine.yaml": experiment, "conf/ablation/mine.yaml": f"{grid}\narms: [model._target_=own.Net]"}
        for path, text in {**files, "own.py": code, "other.py": folder}.items():
            (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / path).write_text(text, encoding="utf-8")
        return Cell(GridPlace("main", "a", (), 1), (f"--config-dir={tmp_path / folder / 'conf'}", "seed=1")).hash

    names = [name("one", "seed: 1"), name("two", "seed: 1", code="x = 1  # one"), name("four", "seed: 1", grid="seed: 7")]
    assert names[0] == names[1] == names[2]
    others = [name("three", "seed: 2"), name("five", "seed: 1", code="x = 2")]
    assert len({names[0], *others, Cell(GridPlace("main", "a", (), 1), ("seed=1",)).hash}) == 4
    monkeypatch.chdir(tmp_path / "five")  # whose own.py comes first, as for Python
    assert name("six", "seed: 1", code="x = 3") == others[1]


def test_the_first_rate_of_a_threshold_and_its_rule_are_part_of_the_cell():
    def threshold(**changes):
        rule = ThresholdConfig(**{"first": {"a": 0.1, "b": 0.02}, **changes})
        study = dataclasses.replace(SIDE, arms=("a", "b"), threshold=rule)
        return {cell.place.arm: cell for cell in cells(grid(studies={"main": study}))}

    found = threshold()
    assert [found[arm].overrides[-2] for arm in "ab"] == ["optimizer.lr=0.1", "optimizer.lr=0.02"]
    more = {"bisections": 3}, {"first": {"a": 0.2, "b": 0.02}}, {"first": {"a": 0.1, "b": 0.5}}
    assert [threshold(**changes)["a"].hash == found["a"].hash for changes in more] == [False, False, True]


def test_the_fingerprint_covers_code_and_configs_that_decide_a_run_and_no_others(tmp_path, monkeypatch):
    decides = [f"minitx/{name}.py" for name in ("nn/a/code", "nn/folding", "ablation/measures", "analysis/statistics")]
    decides += ["minitx/cli/compose.py", "minitx/cli/ablate.py", "minitx/crash_safe.py", "minitx/a_new_folder/code.py"]
    decides += ["configs/train.yaml", "configs/debug/one_step.yaml"]
    other = ["minitx/ablation/judge.py", "minitx/analysis/figures.py", "configs/ablation/grid.yaml", "minitx/nn/notes.txt"]
    left_out = [ROOT / "minitx" / name for name in module._READS_RESULTS]
    assert [
        path for path in (*left_out, *(ROOT / "configs" / name for name in module._OTHER_CONFIGS)) if not path.exists()
    ] == []
    monkeypatch.setattr(module, "__file__", str(tmp_path / "minitx" / "ablation" / "grid.py"))
    monkeypatch.setattr(module, "shipped_configs", lambda: tmp_path / "configs")

    def fingerprint(name, text="x = 1\n"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return code_fingerprint.__wrapped__()

    before = [fingerprint(name) for name in (*decides, *other)][-1]
    for name in (*decides, *other):
        assert (fingerprint(name, "x = 2\n") != before) == (name in decides), name
        assert fingerprint(name) == before
    assert fingerprint(decides[0], '"""What it is."""\n# and why\nx = (\n    1\n)\n') == before


def imported_by(file):
    """The modules of the package that a file imports, as paths in it."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    dotted = [name for node in nodes for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names))]
    paths = [name.removeprefix("minitx.").replace(".", "/") + ".py" for name in dotted if name.startswith("minitx.")]
    return {path for path in paths if (ROOT / "minitx" / path).is_file()}


def test_code_that_the_fingerprint_covers_imports_no_other_code_for_a_run():
    files = {file.relative_to(ROOT / "minitx").as_posix(): file for file in (ROOT / "minitx").rglob("*.py")}
    covered = [name for name in files if not name.startswith(module._READS_RESULTS) and not name.endswith("__init__.py")]
    others = {(name, path) for name in covered for path in imported_by(files[name]) if path.startswith(module._READS_RESULTS)}
    assert others == {
        ("cli/ablate.py", "ablation/judge.py"),
        ("cli/ablate.py", "ablation/report.py"),
        ("cli/ablate.py", "cli/exit_codes.py"),  # the words of an error
        ("cli/compose.py", "cli/hydra_errors.py"),
        ("interop/trial.py", "check/properties.py"),  # the trial that refuses an adopted model
    }


def test_a_grid_run_in_parts_has_the_cells_of_the_whole_and_first_phases_come_along():
    third = dataclasses.replace(SECOND, start=StartConfig(study="second", arm="a"))
    whole = two_phases(main=dataclasses.replace(MAIN, scores=("time",)), third=third)
    whole = dataclasses.replace(whole, comparisons=(design.ComparisonConfig(study="main", arms=("a", "b")),))
    parts = [dataclasses.replace(whole, only=only) for only in (("third",), ("main",))]
    assert [list(part.chosen()) for part in parts] == [["second", "first", "third"], ["main"]]
    assert [{cell.place.study for cell in cells(part)} for part in parts] == [{"second", "first", "third"}, {"main"}]
    assert sorted(cell.hash for part in parts for cell in cells(part)) == sorted(cell.hash for cell in cells(whole))
    assert whole.chosen() == whole.studies


def compared(study="main", arms=("a", "b"), expected=None, law=None, **rest):
    """The fields of a grid that compares two arms, and expects something."""
    expect = (
        (design.ExpectedConfig(study="main", arms=expected, endpoint="time", range=(1.0, None), **rest),) if expected else ()
    )
    law = None if law is None else design.LawConfig(factor=law, power=1.0)
    comparisons = (design.ComparisonConfig(study=study, arms=arms, law=law),)
    return {"comparisons": comparisons, "predictions": {"p": design.PredictionConfig(statement="s", expect=expect)}}


@pytest.mark.parametrize(("changes", "message"), [
    ({"measures": ("loss_at_9",)}, "measures=['loss_at_9'] need the score loss or accuracy"),
    ({"threshold": ThresholdConfig(first={"a": 1.0, "b": 1.0}), "factors": {}}, "threshold searches for the rate itself: remove scores and the factor lr"),
    ({"threshold": ThresholdConfig(first={"a": 1.0}), "scores": (), "factors": {}}, "arms=['b'] not found; threshold.first has a"),
    ({"factors": {"lr": {"0.001": (), "1e-3": ()}}}, "factors.lr names a rate twice: 0.001, 1e-3"),
    ({"factors": {"lr": {"0.001": ("optimizer.lr=1e-2",)}}}, "factors.lr.0.001 has optimizer.lr=1e-2, but the report would show 0.001"),
    ({"factors": {"lr": {"0.001": ("a=1",), 0.001: ("a=2",)}}}, "factors.lr has 0.001 twice"),
    ({"factors": {"seed": INIT}}, "factors.arm and factors.seed are reserved for the arms and seeds"),
    ({"scores": ("time", "time")}, "scores=['time', 'time'] names a score twice"),
    ({"options": {"a": 1}}, "options={'a': 1} need about"),
    ({"comparisons": 2 * compared()["comparisons"]}, "comparisons[1] is a duplicate"),
    ({"skip": ({"init": ("lecunn",)},)}, "skip.init=['lecunn'] not found; it has lecun, gpt2"),
    ({"skip": ({},)}, "skip=[{}] would leave out every run"),
    (compared(law="lr"), "comparisons[0].law.factor=lr must be a factor other than lr whose levels are positive numbers"),
    (compared(law="init"), "comparisons[0].law.factor=init must be a factor other than lr whose levels are positive numbers"),
    ({"launcher_options": {"cluster": "local"}}, "launcher_options={'cluster': 'local'} need launcher=slurm"),
    ({"ratio_margin": 1.0}, "ratio_margin=1 must be above 1"),
    ({"only": ("mian",)}, "only=['mian'] not found; ablation.studies has main, first"),
    ({"arms": {"a": ()}}, "studies.main.arms=['b'] not found; ablation.arms has a"),
    ({"studies": {"second": SECOND}}, "studies.second.start.study=['first'] not found"),
    (compared(study="first"), "comparisons[0].study=first has no scores"),
    (compared(arms=("a", "c")), "comparisons[0].arms=['c'] not found; studies.main.arms has a, b"),
    (compared(expected=("a", "b"), formula=True), "predictions.p.expect[0].formula=true needs a law with parts in the comparison"),
    (compared(expected=("a", "b"), share=True), "predictions.p.expect[0].share=true needs a law with parts in the comparison"),
    (compared(expected=("a", "b"), share=True, formula=True), "predictions.p.expect[0].share=true is a number of its own: no over and no formula"),
    (compared(expected=("b", "a")), "predictions.p.expect[0]: arms=['b', 'a'] of study=main are not in ablation.comparisons"),
])  # fmt: skip
def test_a_grid_or_a_study_that_cannot_be_is_refused(changes, message):
    of_study = {name: changes[name] for name in changes if hasattr(MAIN, name) and name != "arms"}
    of_grid = {name: changes[name] for name in changes if name not in of_study}
    of_study = {"scores": ("time",), **of_study}
    with pytest.raises(ConfigError, match=re.escape(message)):
        grid(**{"studies": {"main": dataclasses.replace(MAIN, **of_study), "first": FIRST}, **of_grid})
