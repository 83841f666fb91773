"""The report of fabricated grids whose truth is known: verdicts, counts, determinism, and what the page may contain."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minitx.ablation import design_figures
from minitx.ablation.predictions import predictions
from minitx.ablation.records import Cells, accuracy_of, collect, loss_of, visible_keys
from minitx.ablation.report import Report, write_report
from minitx.ablation.sections import controls_part
from minitx.ablation.tables import arm_rows, init_rows, ladder_rows, null_pairs, steps_of
from minitx.ablation.verdict import analyse, comparisons
from minitx.config import AblationConfig, ComparisonConfig, ConfigError, ExpectedVerdict, PredictionConfig, StudyConfig

META = {"commit": "0123456", "versions": {"torch": "2.13.0"}, "wall_seconds": 12.0, "command": "python x", "date": "today"}
NOT_A_VALUE = re.compile(r"\b(nan|NaN|inf|None)\b")


@pytest.fixture
def draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, for tests that ask about the words."""
    monkeypatch.setattr("minitx.ablation.report.draw_all", lambda findings: [])


@pytest.fixture(scope="module")
def quick(fabricate: Any, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report, with its figures, of a grid that behaves as the pilot did."""
    return write_report(*fabricate(), tmp_path_factory.mktemp("quick"), meta=META)


def stated(sentences: dict[str, str]) -> dict[str, PredictionConfig]:
    return {name: PredictionConfig(statement=text) for name, text in sentences.items()}


def verdicts(report: Report) -> dict[tuple[str, str, str], str]:
    """Verdict of unscaled − inv_sqrt by endpoint, init and d_k."""
    return {
        (c.endpoint, c.condition["init"], c.condition["head_dim"]): c.judgement.word
        for c in report.findings.comparisons
        if c.arms == ("inv_sqrt", "unscaled")
    }


def words_of(path: Path) -> str:
    """The text of a page without pictures, style and tags."""
    text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", path.read_text(encoding="utf-8"))
    return re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL))


# --- verdicts where the truth is known


def test_a_known_effect_gives_harm_where_it_was_put_and_no_harm_where_it_was_not(quick: Report) -> None:
    assert verdicts(quick) == {
        ("E1", "lecun", "128"): "HARM",
        ("E2", "lecun", "128"): "HARM",
        ("E1", "lecun", "8"): "NO HARM",
        ("E2", "lecun", "8"): "NO HARM",
        ("E1", "gpt2", "128"): "NO HARM",
        ("E2", "gpt2", "128"): "HARM",
        ("E1", "gpt2", "8"): "NO HARM",
        ("E2", "gpt2", "8"): "NO HARM",
    }


def test_the_primary_family_is_two_tests_adjusted_by_holm_and_the_rest_is_not_adjusted(quick: Report) -> None:
    primary = [c for c in quick.findings.comparisons if c.primary]
    assert [(c.endpoint, c.condition) for c in primary] == [
        ("E1", {"head_dim": "128", "init": "lecun"}),
        ("E2", {"head_dim": "128", "init": "lecun"}),
    ]
    assert [(c.p_harm, c.p_adjusted) for c in primary] == [(1 / 64, 2 / 64)] * 2
    assert all(c.p_adjusted is None for c in quick.findings.comparisons if not c.primary)


def tuned_grid(**changes: Any) -> AblationConfig:
    """Rates are chosen on seeds 0 and 1 and judged on 10 to 15."""
    options = {"arms": ("inv_sqrt", "unscaled"), "factors": {"lr": dict.fromkeys(("1e-3", "3e-3"), ())}, "score": "accuracy"}
    study = StudyConfig(**{**options, "tune_seeds": (0, 1), "seeds": tuple(range(10, 16)), **changes})
    pair = ComparisonConfig(study="any", arms=("inv_sqrt", "unscaled"), primary=({},))
    return AblationConfig(arms={"inv_sqrt": (), "unscaled": ()}, studies={"any": study}, comparisons=(pair,))


def scored(grid: AblationConfig, score: Any) -> Cells:
    """The cells of a grid that score ``score(arm, rate, seed)``; those of None are missing."""
    study = grid.studies["any"]
    places = itertools.product(study.arms, study.factors["lr"], (*study.tune_seeds, *study.seeds))
    expected = [{"study": "any", "arm": arm, "factors": {"lr": rate}, "seed": seed} for arm, rate, seed in places]
    records = []
    for cell in expected:
        value = score(cell["arm"], cell["factors"]["lr"], cell["seed"])
        if value is not None:
            result = {"accuracy": value, "val_loss": value, "initial_loss": 9.0, "outcome": "OK", "floors": {}}
            records.append({**cell, "status": "done", "error": None, "overrides": [], "result": result})
    return collect(records, grid, expected)


def judged(grid: AblationConfig, score: Any) -> list[Any]:
    """The comparisons of a grid whose cells score ``score(arm, rate, seed)``."""
    return list(comparisons(scored(grid, score)))


def test_rates_are_chosen_on_seeds_that_are_never_judged() -> None:
    def score(arm: str, rate: str, seed: int) -> float:
        if arm == "inv_sqrt":
            return 1.0
        return {"1e-3": 0.9, "3e-3": 0.5}[rate] if seed < 10 else {"1e-3": 0.6, "3e-3": 1.0}[rate]

    e1, e2 = judged(tuned_grid(), score)
    assert e1.seeds == tuple(range(10, 16))
    assert set(e1.effect.treatment) == {0.6}  # the tuning seeds prefer 1e-3, the judged ones would not
    assert e1.judgement.word == "HARM"
    assert set(e2.effect.treatment) == {0.5}


def test_a_tuning_seed_that_is_lost_is_named_and_blocks_the_verdict() -> None:
    e1, _ = judged(tuned_grid(), lambda arm, rate, seed: None if (arm, seed) == ("unscaled", 1) else 1.0)
    assert e1.judgement.word == "INCONCLUSIVE"
    assert "1 of 7 seeds lack a finished cell (seed 1)" in e1.judgement.reason


@pytest.mark.parametrize(("lost", "chosen"), [((), {"1e-3": 6}), ((0,), {"1e-3": 6}), ((0, 1), {})])
def test_the_table_of_arms_shows_no_rates_that_were_chosen_on_judged_seeds(
    lost: tuple[int, ...], chosen: dict[str, int]
) -> None:
    def score(arm: str, rate: str, seed: int) -> float | None:
        return None if seed in lost else {"1e-3": 0.9, "3e-3": 0.5}[rate]

    rows = arm_rows(scored(tuned_grid(), score))
    assert [row.chosen for row in rows] == [chosen] * 2


def test_a_loss_is_judged_with_its_sign_turned_and_has_no_window() -> None:
    found = judged(tuned_grid(score="loss"), lambda arm, rate, seed: (2.0 if arm == "inv_sqrt" else 2.4) + 0.001 * seed)
    assert [c.endpoint for c in found] == ["E1"]
    assert found[0].effect.difference == pytest.approx(0.4)
    assert (found[0].judgement.word, found[0].p_harm) == ("HARM", 1 / 64)
    better = judged(tuned_grid(score="loss"), lambda arm, rate, seed: 2.4 if arm == "inv_sqrt" else 2.0)
    assert better[0].judgement.word == "INCONCLUSIVE"
    assert "better by more than the margin" in better[0].judgement.reason


def test_the_family_counts_every_primary_endpoint_of_the_grid(make_grid: Any, fabricate: Any) -> None:
    whole = make_grid()
    first, fold, _ = whole.comparisons
    widths = tuple({"init": "lecun", "head_dim": width} for width in ("8", "128"))
    wider = dataclasses.replace(
        whole, comparisons=(dataclasses.replace(first, primary=widths), dataclasses.replace(fold, primary=widths[1:]))
    )
    primary = [c for c in comparisons(collect(*fabricate(wider))) if c.primary]
    assert len(primary) == 6
    smallest = min(primary, key=lambda c: c.p_harm)
    assert smallest.p_adjusted == pytest.approx(6 * smallest.p_harm)


@pytest.mark.slow
def test_without_an_effect_the_primary_verdict_is_hardly_ever_harm(fabricate: Any, make_grid: Any) -> None:
    whole = make_grid()
    grid = dataclasses.replace(whole, studies={"recall": whole.studies["recall"]})
    hits = 0
    for draw in range(12):
        noise = np.random.default_rng(draw)
        cells = collect(*fabricate(grid, accuracy=lambda *_, noise=noise: 0.97 + 0.03 * noise.normal()))
        hits += any(c.judgement.word == "HARM" for c in comparisons(cells) if c.primary)
    assert hits <= 2  # at most 3.1 % each by the floor of the test: 3 of 12 would have p < .006


@pytest.mark.usefixtures("draws_nothing")
def test_equal_arms_give_no_harm_everywhere(fabricate: Any, tmp_path: Path) -> None:
    report = write_report(*fabricate(accuracy=lambda *_: 1.0), tmp_path, meta=META)
    assert set(verdicts(report).values()) == {"NO HARM"}


@pytest.mark.parametrize("seeds", [1, 2, 4])
@pytest.mark.usefixtures("draws_nothing")
def test_too_few_seeds_are_inconclusive_and_the_page_says_why(
    fabricate: Any, make_grid: Any, tmp_path: Path, seeds: int
) -> None:
    report = write_report(*fabricate(make_grid(seeds)), tmp_path, meta=META)
    assert set(verdicts(report).values()) == {"INCONCLUSIVE"}
    words = words_of(tmp_path / "report.html")
    assert words.count("a verdict needs at least 5") == 1
    assert not NOT_A_VALUE.search(words)


def test_the_headline_names_every_endpoint_init_and_width_and_the_ladder(quick: Report) -> None:
    for part in (
        "init lecun, d_k 128 (primary, 6 paired seeds)",
        "init gpt2, d_k 8 (secondary, not adjusted",
        "not confirmatory",
    ):
        assert part in quick.headline
    assert quick.headline.count("accuracy at the best rate") == quick.headline.count("usable window") == 4
    assert "separation first at S2" in quick.headline
    assert "at S3, S5a, S5c" in quick.headline
    assert "both arms fail at S4" in quick.headline


def test_the_steps_of_the_scores_stand_in_the_headline_and_in_the_terminal(quick: Report) -> None:
    for text in (quick.headline, quick.table_text):
        assert all(part in text for part in ("recall 300", "text 300", "ladder 250"))


def test_a_run_that_a_non_finite_number_ended_does_not_count_as_a_budget(fabricate: Any) -> None:
    records, grid, expected = fabricate()
    lost = next(r for r in records if r["study"] == "text")
    lost["result"] |= {"outcome": "NONFINITE", "steps": 17}
    assert steps_of(collect(records, grid, expected), "text") == "300"


def test_predictions_are_judged_with_their_numbers(quick: Report) -> None:
    status = {p.name: p.status for p in quick.predictions}
    assert status == dict.fromkeys(("P1", "P2", "P3", "P4", "P5", "P7"), "HELD") | {"P6": "NOT TESTED"}
    assert all(re.search(r"\d", p.evidence) for p in quick.predictions if p.status == "HELD")


@pytest.mark.usefixtures("draws_nothing")
def test_a_prediction_fails_when_the_data_say_the_opposite(fabricate: Any, tmp_path: Path) -> None:
    def small_is_hurt(arm: str, factors: Any, seed: int, rng: np.random.Generator) -> float:
        hurt = arm == "unscaled" and (factors["head_dim"] == "8" or factors["init"] == "gpt2")
        return 0.3 + 0.01 * rng.random() if hurt else 1.0

    report = write_report(*fabricate(accuracy=small_is_hurt), tmp_path, meta=META)
    status = {p.name: p.status for p in report.predictions}
    assert status["P2"] == status["P3"] == "NOT HELD"


def test_the_predictions_are_those_of_the_grid(fabricate: Any, make_grid: Any) -> None:
    records, grid, expected = fabricate(make_grid(predictions=stated({"P1": "as stated here", "Q9": "something else"})))
    judged = predictions(analyse(collect(records, grid, expected)))
    assert [(p.name, p.statement, p.status) for p in judged] == [
        ("P1", "as stated here", "HELD"),
        ("Q9", "something else", "NOT TESTED"),
    ]


# --- a grid about something else


NORMS = ("pre", "post")


def norm_grid(**changes: Any) -> AblationConfig:
    """Two arms that have nothing to do with the scale, judged by loss and by the loss of longer rows."""
    lr = dict.fromkeys(("1e-3", "3e-3"), ())
    study = StudyConfig(
        arms=NORMS,
        factors={"depth": {"2": (), "6": ()}, "lr": lr},
        seeds=tuple(range(6)),
        score="loss",
        measures=("loss_at_9",),
    )
    pair = ComparisonConfig(study="norms", arms=NORMS, primary=({"depth": "6"},))

    def foretold(verdict: Any, depth: str, endpoint: str = "E1") -> PredictionConfig:
        expected = ExpectedVerdict(study="norms", arms=NORMS, verdict=verdict, endpoint=endpoint, condition={"depth": depth})
        return PredictionConfig(statement="as foretold", expect=(expected,))

    predictions = {"A": foretold("HARM", "6"), "B": foretold("NO HARM", "6"), "C": foretold("NO HARM", "2", "loss_at_9")}
    whole = {"question": "Where the norm stands", "comparisons": (pair,), "predictions": predictions, **changes}
    return AblationConfig(name="norms", arms=dict.fromkeys(NORMS, ()), studies={"norms": study}, **whole)


def norm_records(grid: AblationConfig) -> tuple[list[dict[str, Any]], AblationConfig, list[dict[str, Any]]]:
    """Post-norm is 0.3 nats worse at depth 6 and equal at 2; at 3e-3 everything is better but the loss of longer rows."""
    expected, records = [], []
    for arm, depth, rate, seed in itertools.product(NORMS, ("2", "6"), ("1e-3", "3e-3"), range(6)):
        cell = {"study": "norms", "arm": arm, "factors": {"depth": depth, "lr": rate}, "seed": seed}
        loss = 2.0 + 0.001 * seed + 0.3 * (arm == "post" and depth == "6") - 0.1 * (rate == "3e-3")
        result = {"val_loss": loss, "initial_loss": 4.0, "outcome": "OK", "floors": {}, "accuracy": None, "probes": []}
        result |= {"measures": {"loss_at_9": loss + (2.0 if rate == "3e-3" else 0.5)}, "num_parameters": 7, "steps": 3}
        expected.append(cell)
        records.append({**cell, "status": "done", "error": None, "overrides": [], "result": result})
    return records, grid, expected


def test_a_grid_about_something_else_gets_the_same_kind_of_report(tmp_path: Path) -> None:
    report = write_report(*norm_records(norm_grid()), tmp_path, meta=META)
    assert "norms, post − pre (paired by seed; positive is harm): depth 6 (primary, 6 paired seeds): " in report.headline
    assert "Secondary: loss at 9 +0.300 (95 % +0.300 to +0.300): HARM." in report.headline
    assert [(c.condition["depth"], c.endpoint, c.judgement.word) for c in report.findings.comparisons] == [
        ("6", "E1", "HARM"),
        ("2", "E1", "NO HARM"),
        ("2", "loss_at_9", "NO HARM"),
        ("6", "loss_at_9", "HARM"),
    ]
    words = words_of(tmp_path / "report.html")
    assert "Where the norm stands" in words
    assert not any(word in words for word in ("√d_k", "inv_sqrt", "ladder", "init sweep"))
    assert {p.name for p in report.files if p.suffix == ".png"} == {"norms_rates.png", "norms_arms.png", "paired_seeds.png"}


def test_a_measure_is_taken_at_the_rate_that_the_score_chose() -> None:
    found = analyse(collect(*norm_records(norm_grid()))).comparisons
    measured = next(c for c in found if c.endpoint == "loss_at_9" and c.condition == {"depth": "2"})
    assert measured.effect is not None
    assert measured.effect.reference[0] == pytest.approx(1.9 + 2.0)  # 3e-3, though 1e-3 has the smaller loss at 9 tokens
    assert not measured.primary


def test_a_prediction_is_held_against_the_verdicts_that_it_foretells() -> None:
    records, grid, expected = norm_records(norm_grid())
    status = {p.name: p.status for p in predictions(analyse(collect(records, grid, expected)))}
    assert status == {"A": "HELD", "B": "NOT HELD", "C": "HELD"}
    unfinished = [r for r in records if not (r["seed"] == 3 and r["factors"]["depth"] == "6")]
    status = {p.name: p.status for p in predictions(analyse(collect(unfinished, grid, expected)))}
    assert status == {"A": "INCONCLUSIVE", "B": "INCONCLUSIVE", "C": "HELD"}


@pytest.mark.usefixtures("draws_nothing")
def test_a_family_too_large_for_its_seeds_is_said_to_find_no_harm(tmp_path: Path) -> None:
    pair = ComparisonConfig(study="norms", arms=NORMS, primary=({},))
    twice = (pair, dataclasses.replace(pair, arms=NORMS[::-1]))
    sentence = "With 6 paired seeds and 4 primary endpoints no adjusted p can fall below 0.0625"
    assert sentence in words_of(
        write_report(*norm_records(norm_grid(comparisons=twice)), tmp_path, meta=META).folder / "report.html"
    )
    write_report(*norm_records(norm_grid()), tmp_path, meta=META)
    assert "no adjusted p can fall" not in words_of(tmp_path / "report.html")


def test_a_gain_is_no_harm_though_nothing_shows_equality() -> None:
    records, grid, expected = norm_records(norm_grid())
    for record in records:
        record["arm"] = {"pre": "post", "post": "pre"}[record["arm"]]  # post-norm is now better at depth 6
    found = analyse(collect(records, grid, expected))
    gain = next(c for c in found.comparisons if c.endpoint == "E1" and c.condition["depth"] == "6")
    assert (gain.judgement.word, gain.is_gain) == ("INCONCLUSIVE", True)
    assert (gain.agrees("HARM"), gain.agrees("NO HARM")) == (False, True)
    assert {p.name: p.status for p in predictions(found)}["A"] == "NOT HELD"
    assert {p.name: p.status for p in predictions(found)}["B"] == "HELD"


@pytest.mark.parametrize(("outcome", "status"), [("OK", "a run left no number"), ("DIVERGED", "")])
def test_a_missing_measure_is_never_taken_from_the_score(outcome: str, status: str) -> None:
    records, grid, expected = norm_records(norm_grid())
    place = {"depth": "2", "lr": "3e-3"}
    lost = next(r for r in records if (r["arm"], r["seed"]) == ("post", 0) and r["factors"] == place)
    lost["result"] |= {"measures": {}, "outcome": outcome}
    found = analyse(collect(records, grid, expected)).comparisons
    c = next(c for c in found if c.endpoint == "loss_at_9" and c.condition == {"depth": "2"})
    assert status in c.judgement.reason
    assert (c.effect is None) == (outcome == "OK")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("post", "pre")}, "are not in ablation.comparisons"),
        ({"endpoint": "E2"}, "endpoint=E2 must be one of E1, loss_at_9"),
        ({"condition": {"depth": "7"}}, "depth=7 is no level"),
    ],
)
def test_a_prediction_about_nothing_is_refused(changes: Any, message: str) -> None:
    expected = ExpectedVerdict(**{"study": "norms", "arms": NORMS, "verdict": "HARM", **changes})
    with pytest.raises(ConfigError, match=message):
        norm_grid(predictions={"A": PredictionConfig(statement="x", expect=(expected,))})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparisons": (ComparisonConfig(study="norms", arms=("pre", "pre")),)}, "compares an arm with itself"),
        ({"comparisons": (ComparisonConfig(study="norms", arms=NORMS, primary=({"lr": "1e-3"},)),)}, "lr=1e-3 is tuned"),
        ({"trim": {"norm": ()}}, "trim=['norm'] are no studies of this grid; it has norms"),
    ],
)
def test_a_grid_that_means_nothing_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        norm_grid(predictions={}, **changes)


def test_a_measure_that_no_run_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_at_far"):
        StudyConfig(score="loss", measures=("loss_at_far",))


# --- nothing is lost


@pytest.mark.usefixtures("draws_nothing")
def test_a_failed_and_a_missing_cell_are_counted_named_and_block_the_verdict(fabricate: Any, tmp_path: Path) -> None:
    records, grid, expected = fabricate()
    wide = {"arm": "unscaled", "factors": {"head_dim": "128", "init": "lecun", "lr": "3e-3"}, "seed": 4}
    lost = next(i for i, r in enumerate(records) if {k: r[k] for k in wide} == wide)
    records[lost] = records[lost] | {"status": "failed", "error": "out of memory", "result": None}
    gone = next(i for i, r in enumerate(records) if r["study"] == "text")
    del records[gone]
    report = write_report(records, grid, expected, tmp_path, meta=META)
    cells = report.findings.cells
    assert list(map(len, (cells.expected, cells.done, cells.failed, cells.missing))) == [288, 286, 1, 1]
    assert "1 failed, 1 missing" in report.table_text
    words = words_of(tmp_path / "report.html")
    assert "288 expected, 286 done, 1 failed, 1 missing" in words
    assert "out of memory" in words
    assert verdicts(report)["E1", "lecun", "128"] == "INCONCLUSIVE"
    assert "1 of 6 seeds lack a finished cell (seed 4)" in words
    assert verdicts(report)["E1", "gpt2", "128"] == "NO HARM"


@pytest.mark.usefixtures("draws_nothing")
def test_a_cell_of_another_grid_is_counted_and_changes_no_table(fabricate: Any, tmp_path: Path, quick: Report) -> None:
    records, grid, expected = fabricate()
    stranger = records[0] | {"seed": 99}
    report = write_report([*records, stranger], grid, expected, tmp_path, meta=META)
    assert report.findings.comparisons == quick.findings.comparisons
    assert "1 that belong to no cell of the grid" in words_of(tmp_path / "report.html")


def test_a_retried_cell_counts_once_and_the_finished_record_wins(fabricate: Any) -> None:
    records, grid, expected = fabricate()
    failed = records[0] | {"status": "failed", "error": "first try", "result": None}
    for order in ([failed, *records], [*records, failed]):
        cells = collect(order, grid, expected)
        assert (len(cells.done), len(cells.failed)) == (288, 0)


def test_the_csv_has_one_line_for_every_expected_cell(quick: Report) -> None:
    rows = list(csv.DictReader(io.StringIO((quick.folder / "cells.csv").read_text(encoding="utf-8"))))
    assert len(rows) == len(quick.findings.cells.expected)
    nonfinite = [row for row in rows if row["outcome"] == "NONFINITE"]
    assert [(row["rung"], row["val_loss"], row["nonfinite_step"]) for row in nonfinite] == [("S5c", "", "120")]


# --- diverged runs


def test_diverged_runs_score_the_loss_at_init_and_chance() -> None:
    result = {"outcome": "NONFINITE", "val_loss": None, "accuracy": None, "initial_loss": 4.2, "floors": {}}
    record = {"result": result, "overrides": ["data=kv_lookup", "data.num_values=8"]}
    assert loss_of(record) == 4.2
    assert accuracy_of(record) == 1 / 8
    assert loss_of({**record, "result": result | {"outcome": "DIVERGED", "val_loss": 9.0}}) == 4.2
    assert accuracy_of({**record, "result": result | {"accuracy": 0.3}}) == 0.3


@pytest.mark.parametrize(
    ("overrides", "tokens", "chance"),
    [
        (["data=kv_lookup"], 17, 1 / 16),
        (["data=kv_lookup", "data.num_pairs=5", "data.num_values=4"], 6, 1 / 4),
        (["data=multi_query_recall", "data.num_pairs=7", "data.num_queries=3"], 17, 1 / 16),
        (["experiment=x", "data.context_len=31", "+data.batch_size=3"], 31, 0.0),
    ],
)
def test_a_cell_knows_the_length_and_the_chance_of_its_data(overrides: list[str], tokens: int, chance: float) -> None:
    record = {"overrides": overrides, "result": {"accuracy": None, "floors": {}}}
    assert visible_keys(record) == tokens
    assert accuracy_of(record) == chance


def test_the_ladder_names_signs_only_where_the_scaled_arm_trains(fabricate: Any) -> None:
    cells = collect(*fabricate())
    rows = {row.rung: row for row in ladder_rows(cells)}
    assert list(rows) == ["S0", "S1", "S2", "S3", "S4", "S5a", "S5b", "S5c"]
    assert [rung for rung, row in rows.items() if row.signs] == ["S3", "S5a", "S5c"]
    assert [rung for rung, row in rows.items() if row.both_fail] == ["S4"]
    assert rows["S5c"].difference == pytest.approx(4.3 - rows["S5c"].runs[0]["result"]["val_loss"])
    assert any("median gradient norm" in sign for sign in rows["S3"].signs)
    assert any("spikes" in sign for sign in rows["S5c"].signs)


def test_the_null_control_fails_on_a_single_different_bit(fabricate: Any) -> None:
    records, grid, expected = fabricate()
    assert [p.equal for p in null_pairs(collect(records, grid, expected))] == [True]
    i = next(i for i, r in enumerate(records) if r["arm"] == "full_fold")
    records[i] = records[i] | {"result": records[i]["result"] | {"loss_digest": "0" * 64}}
    assert [p.equal for p in null_pairs(collect(records, grid, expected))] == [False]
    assert [p.equal for p in null_pairs(collect(records[:i] + records[i + 1 :], grid, expected))] == [None]


def test_init_rows_hold_the_row_std_beside_the_threshold_of_the_row_length(fabricate: Any) -> None:
    rows = {(r.arm, r.init, r.head_dim): r for r in init_rows(collect(*fabricate()))}
    assert len(rows) == 70
    wide = rows["unscaled", "lecun", "64"]
    assert wide.values["row_std"] == pytest.approx(8.0, rel=0.1)
    assert wide.threshold == pytest.approx(math.sqrt(2 * math.log(64)))
    assert [w for (_, i, w) in rows if i == "lecun"][:2] == ["4", "4"]  # numbers ascend, 4 before 16


def test_a_floor_in_a_study_of_its_own_is_reported_as_a_control(fabricate: Any, make_grid: Any) -> None:
    place = {"head_dim": {"128": ()}, "init": {"lecun": ()}, "lr": {"3e-3": ()}}
    grid = make_grid(studies={"floor": StudyConfig(arms=("uniform",), factors=place, seeds=(0, 1))})
    _, said = controls_part(analyse(collect(*fabricate(grid))))
    assert said.startswith("Floor without attention (uniform), init lecun, d_k 128: mean accuracy 0.196, largest 0.200")


# --- the files


@pytest.mark.long
def test_the_order_of_the_records_never_shows(fabricate: Any, tmp_path: Path, quick: Report) -> None:
    records, grid, expected = fabricate()
    random.Random(4).shuffle(records)
    random.Random(5).shuffle(expected)
    report = write_report(records, grid, expected, tmp_path, meta=META)
    assert [p.name for p in report.files] == [p.name for p in quick.files]
    for mine, theirs in zip(report.files, quick.files, strict=True):
        assert mine.read_bytes() == theirs.read_bytes(), mine.name
    assert (report.headline, report.table_text) == (quick.headline, quick.table_text)


def test_every_figure_is_a_png_beside_the_page_and_inside_it(quick: Report) -> None:
    pictures = [p for p in quick.files if p.suffix == ".png"]
    assert len(pictures) == 10
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    page = (quick.folder / "report.html").read_text(encoding="utf-8")
    assert page.count('src="data:image/png;base64,') == len(pictures)
    assert all(f"({p.name})" in (quick.folder / "summary.md").read_text(encoding="utf-8") for p in pictures)


def test_dose_and_two_by_two_are_drawn_with_every_seed_as_a_dot(fabricate: Any) -> None:
    rates = dict.fromkeys(("1e-3", "1e-2"), ())
    options = {"seeds": (0, 1, 2), "score": "accuracy"}
    studies = {
        "dose": StudyConfig(
            arms=("inv_sqrt",), factors={"alpha": dict.fromkeys(("0.5", "1", "11.3"), ()), "lr": rates}, **options
        ),
        "two_by_two": StudyConfig(
            arms=("inv_sqrt", "lr_fold", "init_fold", "unscaled"),
            factors={"norm_position": dict.fromkeys(("pre", "post"), ()), "lr": rates},
            **options,
        ),
    }
    arms = dict.fromkeys(("inv_sqrt", "lr_fold", "init_fold", "unscaled"), ())
    records, grid, expected = fabricate(AblationConfig(arms=arms, studies=studies))
    assert len(records) == 18 + 48
    for record in records:  # the response to the dose is known: solved up to 1, at the lower rate only beyond
        alpha, rate = record["factors"].get("alpha"), record["factors"]["lr"]
        record["result"]["accuracy"] = 0.2 if alpha == "11.3" and rate == "1e-2" else 1.0
    findings = analyse(collect(records, grid, expected))
    best, window = design_figures.dose_response(findings).axes
    assert [dots(ax) for ax in (best, window)] == [[1.0] * 9, [1.0] * 6 + [0.5] * 3]
    assert [len(dots(ax)) for ax in design_figures.two_by_two(findings).axes] == [12] * 4
    empty = analyse(collect([], grid, expected))
    assert design_figures.dose_response(empty) is design_figures.two_by_two(empty) is None


def dots(ax: Any) -> list[float]:
    """The heights of the single points of a panel."""
    return [float(line.get_ydata()[0]) for line in ax.get_lines() if len(line.get_xdata()) == 1]


def test_the_page_asks_the_network_for_nothing(quick: Report) -> None:
    page = (quick.folder / "report.html").read_text(encoding="utf-8")
    assert "http:" not in page
    assert "https:" not in page
    assert "//" not in re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page)
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', page))
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_no_missing_number_shows_as_a_word(quick: Report) -> None:
    for name in ("report.html", "summary.md"):
        words = words_of(quick.folder / name)
        assert not NOT_A_VALUE.findall(words)


def test_the_twelve_parts_stand_in_order(quick: Report) -> None:
    titles = re.findall(r'<h2 id="s(\d+)">\d+\. ([^<]+)</h2>', (quick.folder / "report.html").read_text(encoding="utf-8"))
    assert [int(number) for number, _ in titles] == list(range(1, 13))
    assert titles[0][1] == "Verdict"
    assert titles[-1][1] == "The predictions"


def test_names_from_configs_are_escaped(fabricate: Any, make_grid: Any, tmp_path: Path) -> None:
    evil = '<script>alert("$x")</script>'
    grid = make_grid(name=evil, predictions=stated({evil: evil}))
    study = StudyConfig(arms=("inv_sqrt", "unscaled", evil), factors=grid.studies["recall"].factors, seeds=(0, 1))
    grid = AblationConfig(name=evil, arms={**grid.arms, evil: ()}, studies={"recall": study}, predictions=stated({evil: evil}))
    write_report(*fabricate(grid), tmp_path, meta={"command": evil})
    for name in ("report.html", "summary.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "<script" not in text
        assert "&lt;script&gt;" in text


def test_the_terminal_table_fits_one_hundred_columns(quick: Report) -> None:
    assert max(map(len, quick.table_text.splitlines())) <= 100
    assert "HARM" in quick.table_text
    assert "S5c" in quick.table_text


# --- grids that lack something


@pytest.mark.usefixtures("draws_nothing")
@pytest.mark.parametrize("kept", ["recall", "text", "ladder", "init_sweep", "null_control"])
def test_a_grid_with_one_study_alone_makes_a_report(fabricate: Any, make_grid: Any, tmp_path: Path, kept: str) -> None:
    whole = make_grid(1)
    grid = AblationConfig(arms=whole.arms, studies={kept: whole.studies[kept]})
    report = write_report(*fabricate(grid), tmp_path, meta={})
    assert len(report.findings.cells.done) == len(report.findings.cells.expected) > 0
    if kept != "recall":
        assert "compares no two arms" in report.headline


@pytest.mark.parametrize("status", ["missing", "failed"])
def test_a_grid_of_which_nothing_finished_makes_a_report(fabricate: Any, tmp_path: Path, status: str) -> None:
    records, grid, expected = fabricate()
    records = [r | {"status": "failed", "error": None, "result": None} for r in records] if status == "failed" else []
    report = write_report(records, grid, expected, tmp_path, meta={})
    assert len(getattr(report.findings.cells, status)) == len(report.findings.cells.expected)
    assert set(verdicts(report).values()) == {"INCONCLUSIVE"}
    assert "No figure" in words_of(tmp_path / "report.html")


@pytest.mark.slow
def test_runs_without_probes_or_numbers_make_a_report(fabricate: Any, make_grid: Any, tmp_path: Path) -> None:
    records, grid, expected = fabricate(make_grid(2))
    for record in records:
        record["result"] |= {
            "val_loss": float("nan"), "accuracy": None, "outcome": "NONFINITE", "probes": [], "grad_norm_median": None,
            "grad_norm_max": float("inf"), "spike_share": None, "curve": [[0, float("nan"), float("inf")]], "floors": {},
        }  # fmt: skip
    report = write_report(records, grid, expected, tmp_path, meta={})
    assert not NOT_A_VALUE.findall(words_of(tmp_path / "report.html"))
    assert "both arms fail at S0, S1" in report.headline
