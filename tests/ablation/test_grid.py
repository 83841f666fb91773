"""A grid as data: which cells, in which order, under which names."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest

import minitx.ablation.grid as module
from minitx.ablation.grid import Cell, cells, code_fingerprint
from minitx.cli.compose import build_config, compose_config
from minitx.config import AblationConfig, ComparisonConfig, ConfigError, PredictionConfig, StudyConfig

ROOT = Path(__file__).parents[2]
ARMS = {"a": ("model.scale=inv_sqrt",), "b": ("model.scale=unscaled", "optimizer.rules=[{match: '(q|k)_proj', lr: 2}]")}
FACTORS = {
    "init": {"lecun": ("model.init=lecun",), "gpt2": ("model.init=gpt2",)},
    "lr": {"low": (), "high": ("optimizer.lr=1",)},
}


def grid(**changes):
    main = StudyConfig(base=("experiment=x", "trainer.max_steps=7"), arms=("a", "b"), factors=FACTORS, seeds=(5, 3, 9))
    side = StudyConfig(base=("experiment=y", "trainer.max_steps=2"), arms=("b",), seeds=(3, 4))
    return AblationConfig(**{"arms": ARMS, "studies": {"main": main, "side": side}, **changes})


def test_cells_come_in_seed_blocks_so_that_a_truncated_grid_is_balanced():
    found = cells(grid())
    assert len(found) == 3 * 8 + 2
    seeds = [cell.seed for cell in found if cell.study == "main"]
    assert seeds == [5] * 8 + [3] * 8 + [9] * 8
    assert [(cell.study, cell.seed) for cell in found[:9]] == [("main", 5)] * 8 + [("side", 3)]
    for block in (found[:8], found[9:17]):
        assert {(cell.arm, *cell.factors.values()) for cell in block} == {
            (arm, init, lr) for arm in "ab" for init in ("lecun", "gpt2") for lr in ("low", "high")
        }


def test_arms_of_one_comparison_stand_side_by_side():
    found = cells(grid())
    for first, second in zip(found[:8:2], found[1:8:2], strict=True):
        assert (first.arm, second.arm) == ("a", "b")
        assert first.factors == second.factors


def test_overrides_come_in_the_order_in_which_later_ones_win():
    trimmed = cells(grid(trim={"main": ("trainer.max_steps=3",)}), common=["data.num_workers=0"], trimmed=True)
    cell = next(c for c in trimmed if c.arm == "b" and c.factors == {"init": "gpt2", "lr": "high"} and c.seed == 9)
    assert cell.overrides == (
        "experiment=x", "trainer.max_steps=7", *ARMS["b"], "model.init=gpt2", "optimizer.lr=1", "trainer.max_steps=3", "seed=9",
        "data.num_workers=0",
    )  # fmt: skip
    assert cell.steps() == 3


def test_trim_applies_where_it_is_asked_for_only():
    trim = {"main": ("trainer.max_steps=3",)}
    assert {cell.steps() for cell in cells(grid(trim=trim))} == {7, 2}
    assert {cell.steps() for cell in cells(grid(trim=trim), trimmed=True)} == {3, 2}


def test_skip_leaves_out_what_matches_every_key_of_an_entry():
    study = dataclasses.replace(
        grid().studies["main"], skip=({"init": ("gpt2",), "arm": ("b",)}, {"lr": ("high",), "arm": ("a",)})
    )
    found = {(c.arm, c.factors["init"], c.factors["lr"]) for c in cells(grid(studies={"main": study}))}
    assert found == {("a", "lecun", "low"), ("a", "gpt2", "low"), ("b", "lecun", "low"), ("b", "lecun", "high")}


@pytest.mark.parametrize("skip", [{"width": ("8",)}, {"init": ("lecunn",)}, {"arm": ("c",)}])
def test_a_skip_that_names_nothing_is_refused(skip):
    study = dataclasses.replace(grid().studies["main"], skip=(skip,))
    with pytest.raises(ConfigError, match=rf"ablation\.studies\.main\.skip names {next(iter(skip))}"):
        cells(grid(studies={"main": study}))


def test_the_same_run_twice_is_refused():
    study = dataclasses.replace(grid().studies["main"], seeds=(1, 2, 1))
    with pytest.raises(ConfigError, match="two cells of the grid are the same run"):
        cells(grid(studies={"main": study}))


def test_an_arm_that_is_not_defined_is_refused():
    with pytest.raises(ConfigError, match=r"studies.x.arms=\['c'\] are not defined; ablation.arms has a, b"):
        AblationConfig(arms=ARMS, studies={"x": StudyConfig(arms=("a", "c"))})


@pytest.mark.parametrize("steps", [(), ("trainer.max_steps=many",)])
def test_a_study_without_a_length_is_refused_by_name(steps):
    cell = Cell("main", "a", {}, 0, ("experiment=x", *steps))
    with pytest.raises(ConfigError, match=r"ablation.studies.main.*trainer.max_steps"):
        cell.steps()


def test_the_name_of_a_cell_depends_on_what_decides_its_result():
    base = Cell("main", "a", {"lr": "low"}, 1, ("seed=1",))
    assert base.hash == Cell("main", "a", {"lr": "low"}, 1, ("seed=1",)).hash
    others = [
        dataclasses.replace(base, overrides=("seed=2",)),
        dataclasses.replace(base, overrides=("seed=1", "seed=1")),
        dataclasses.replace(base, arm="b"),
        dataclasses.replace(base, study="side"),
        dataclasses.replace(base, factors={"lr": "high"}),
    ]
    assert len({base.hash, *(cell.hash for cell in others)}) == 6


def test_the_name_of_a_cell_follows_the_users_own_configs_and_not_their_place(tmp_path):
    def name(folder, experiment, grid="seed: 0"):
        for path, text in ((f"{folder}/experiment/mine.yaml", experiment), (f"{folder}/ablation/mine.yaml", grid)):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return Cell("main", "a", {}, 1, (f"--config-dir={tmp_path / folder}", "seed=1")).hash

    names = [name("one", "seed: 1"), name("two", "seed: 1"), name("three", "seed: 2"), name("four", "seed: 1", grid="seed: 7")]
    assert names[0] == names[1] == names[3] != names[2]
    assert Cell("main", "a", {}, 1, ("seed=1",)).hash not in names


def test_a_cell_starts_from_an_experiment_of_the_users_own(tmp_path):
    (tmp_path / "it's mine" / "experiment").mkdir(parents=True)
    shipped = (ROOT / "configs" / "experiment" / "scaling_cell_recall.yaml").read_text(encoding="utf-8")
    own = tmp_path / "it's mine" / "experiment" / "my_cell.yaml"
    own.write_text(shipped.replace("experiment: scaling_cell_recall", "experiment: my_cell"), encoding="utf-8")
    words = [f"--config-dir={own.parents[1]}", "experiment=my_cell", "seed=7"]
    config = compose_config([words[1], words[0], words[2]])
    assert (config.experiment, config.seed) == ("my_cell", 7)
    cell = Cell("main", "a", {}, 7, (words[1], words[0], words[2]))
    assert shlex.split(cell.command)[2:] == words  # as argparse wants them


def test_what_only_judges_the_grid_leaves_the_names_of_its_cells_alone():
    names = [cell.hash for cell in cells(grid())]
    judged = grid(
        margin=0.5,
        predictions={"P1": PredictionConfig(statement="x")},
        workers=7,
        time_limit=3.0,
        confirmatory=True,
        name="other",
    )
    assert [cell.hash for cell in cells(judged)] == names


def fingerprint_of(root, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(root / "ablation" / "grid.py"))
    code_fingerprint.cache_clear()
    try:
        return code_fingerprint()
    finally:
        monkeypatch.undo()
        code_fingerprint.cache_clear()


def test_the_fingerprint_covers_the_code_that_decides_a_run_and_no_other(tmp_path, monkeypatch):
    decides = ("nn/backends/code.py", "data/code.py", "training/code.py", "config/data.py", "analysis/statistics.py")
    other = ("ablation/code.py", "cli/code.py", "config/ablation.py", "analysis/figures.py")
    for name in (*decides, *other):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    before = fingerprint_of(tmp_path, monkeypatch)
    for name in (*decides, *other):
        (tmp_path / name).write_text("x = 2\n")
        assert (fingerprint_of(tmp_path, monkeypatch) != before) == (name in decides), name
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "data" / "code.py").write_text('"""What it is."""\n# and why\nx = (\n    1\n)\n')
    assert fingerprint_of(tmp_path, monkeypatch) == before
    (tmp_path / "data" / "code.py").write_text('"""What it is."""\nx = "1"\n')
    assert fingerprint_of(tmp_path, monkeypatch) != before
    (tmp_path / "data" / "code.py").write_text("x = 1\n")
    (tmp_path / "nn" / "backends" / "code.py").rename(tmp_path / "nn" / "code.py")
    assert fingerprint_of(tmp_path, monkeypatch) != before
    assert len(code_fingerprint()) == 16


def test_the_fingerprint_covers_the_configs_that_cells_start_from(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    for name in ("__init__.py", "train.yaml", "experiment/cell.yaml", "experiment/notes.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(module, "find_spec", lambda _: SimpleNamespace(origin=tmp_path / "__init__.py"))
    seen = set()
    for name in ("experiment/notes.txt", "experiment/cell.yaml", "train.yaml"):
        code_fingerprint.cache_clear()
        seen.add(code_fingerprint())
        (tmp_path / name).write_text("x: 2")
    code_fingerprint.cache_clear()
    seen.add(code_fingerprint())
    monkeypatch.undo()
    code_fingerprint.cache_clear()
    assert len(seen) == 3  # the notes change nothing


def test_the_stored_command_says_to_a_shell_what_the_cell_is():
    for cell in cells(grid()):
        words = shlex.split(cell.command)
        assert words[:2] == ["python", "scripts/train.py"]
        assert tuple(words[2:]) == cell.overrides
        assert cell.describe()["command"] == cell.command
        assert cell.describe()["cell"] == cell.hash


def test_cells_to_tune_on_come_first_and_a_seed_is_never_both():
    study = StudyConfig(arms=("a",), base=("trainer.max_steps=1",), tune_seeds=(5, 6), seeds=(0,))
    grid = AblationConfig(arms={"a": ()}, studies={"one": study})
    assert [cell.seed for cell in cells(grid)] == [5, 6, 0]
    with pytest.raises(ConfigError, match=r"studies\.one\.tune_seeds=\[0, 5\] are judged too: seed \[0\]"):
        AblationConfig(arms={"a": ()}, studies={"one": dataclasses.replace(study, tune_seeds=(0, 5))})


@pytest.mark.parametrize(("changes", "message"), [
    ({"study": "two"}, "comparisons[0].study=two is not defined; ablation.studies has one, bare"),
    ({"study": "bare"}, "comparisons[0].study=bare has no score; set studies.bare.score"),
    ({"arms": ("a", "c")}, "comparisons[0].arms=['c'] are not in studies.one.arms=['a', 'b']"),
    ({"primary": ({"width": "9"},)}, "comparisons[0].primary: width=9 is no level of studies.one.factors"),
])  # fmt: skip
def test_a_comparison_that_names_nothing_is_refused(changes, message):
    study = StudyConfig(arms=("a", "b"), factors={"width": {"8": ()}}, score="loss")
    comparison = ComparisonConfig(**{"study": "one", "arms": ("a", "b"), **changes})
    studies = {"one": study, "bare": StudyConfig(arms=("a", "b"))}
    with pytest.raises(ConfigError, match=re.escape(message)):
        AblationConfig(arms={"a": (), "b": ()}, studies=studies, comparisons=(comparison,))


def test_a_grid_run_in_parts_has_the_cells_of_the_whole():
    whole = grid(comparisons=(ComparisonConfig(study="scored", arms=("a", "b")),), studies={
        **grid().studies, "scored": StudyConfig(base=("trainer.max_steps=2",), arms=("a", "b"), score="loss"),
    })  # fmt: skip
    parts = [dataclasses.replace(whole, only=only).chosen() for only in (("main",), ("side", "scored"))]
    assert [list(part.studies) for part in parts] == [["main"], ["side", "scored"]]
    assert [len(part.comparisons) for part in parts] == [0, 1]
    assert {cell.hash for part in parts for cell in cells(part)} == {cell.hash for cell in cells(whole)}
    assert whole.chosen() is whole
    with pytest.raises(ConfigError, match=r"only=\['mian'\] are no studies of this grid; it has main, side, scored"):
        dataclasses.replace(whole, only=("mian",))


def test_the_grid_in_the_docs_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "ablation.md").read_text(encoding="utf-8")
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "my_qk_norm.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    with hydra.initialize_config_module("minitx.configs", version_base="1.3"):
        search = f"hydra.searchpath=[file://{tmp_path}]"
        grid = build_config(hydra.compose("train", ["experiment=scaling_ablation", "ablation=my_qk_norm", search])).ablation
    found = cells(grid)
    assert len(found) == 2 * 3 * 6
    assert [c.study for c in grid.comparisons] == ["recall"]
    assert {compose_config(cell.overrides).model.qk_norm for cell in found[:6]} == {None, "rms"}
