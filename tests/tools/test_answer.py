"""The pages have the numbers of the records, which are computed without the lab; and the tool for mutants finds its files."""

import re
from itertools import chain
from pathlib import Path

import answer
import mutation
import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = {
    str(number) for number in (0, 1, 2, 3, 4, 5, 8, 16, 28, 32, 40, 64, 90, 95, 128, 200, 512, 0.02, 0.1, 0.22, 1.8, 2.8)
}
"""Of the grids, their models and their predictions."""


@pytest.fixture(scope="module")
def found():
    return answer.numbers()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_answer_of_a_readme_is_made_from_the_records_and_is_a_table_with_few_words_around_it(found, page):
    lines = answer.answer(found)[page]
    assert "\n".join(lines) in (ROOT / page).read_text(encoding="utf-8")
    around = " ".join(line for line in lines if not line.startswith("|"))
    assert len(around.split()) <= 60 and not re.search(r"\([^)]*\(", around)


def test_a_mean_of_the_last_steps_stands_at_its_last_step_and_the_first_at_step_0():
    assert list(answer.last_means([1.0, 0.0, 0.5, 0.25], 2)) == [1.0, 0.5, 0.25, 0.375]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["why_scale.md", "why_scale.zh.md"])
def test_every_number_of_the_part_from_the_records_is_of_the_records_or_a_setting(found, page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    whole = [*("\n".join(rows) for rows in answer.tables(found).values()), *answer.sentences(found)[page]]
    assert [each for each in whole if each not in text] == []
    (part,) = re.findall("<!-- from the records -->(.*?)<!-- end of the records -->", text, flags=re.DOTALL)
    printed = {*re.findall(r"[\d.]*\d", "\n".join(whole)), *SETTINGS}
    shown = re.findall(r"(?<![\w.])[\d.]*\d(?!\w)", re.sub(r"\]\([^)]*\)", "", part))
    assert {number for number in shown if number not in printed} == set()


@pytest.mark.slow
def test_the_notebook_has_the_numbers_of_the_records(found):
    text = (ROOT / "examples" / "attention.py").read_text(encoding="utf-8")
    for sentence in answer.notebook(found).values():
        assert sentence in text


def test_the_searches_of_the_record_end_where_their_own_curves_say():
    searches = [one for one in answer.read("limits/cells.jsonl.xz") if "runs" in one["result"]]
    assert len(searches) == 740
    for one in searches:
        result = one["result"]
        middle = (result["low"] * result["high"]) ** 0.5
        assert answer.largest_rate(result["runs"], result["cap"]) == pytest.approx(middle, rel=1e-6)


@pytest.mark.parametrize(
    ("record", "by_loss", "searches"), [("limits", False, 80), ("real", True, 8), ("text_parts", True, 16)]
)
def test_the_published_reports_put_every_largest_rate_on_the_side_of_its_bounds_where_its_runs_put_it(
    record, by_loss, searches
):
    count = answer.sides(answer.brackets(answer.read(f"{record}/cells.jsonl.xz"), by_loss))
    report = (answer.RECORDS / record / "summary.md").read_text(encoding="utf-8")
    assert {side: report.count(f"| {side} |") for side in count} == count and sum(count.values()) == searches
    assert f"{count['between']} of {searches} lie between them" in report


def test_the_models_of_text_parts_and_their_searches_with_all_weights_are_those_of_text():
    """The models are equal bit for bit, so that both records are about the same models."""
    first, second = (dict(_results(record)) for record in ("text", "text_parts"))
    shared = first.keys() & second.keys()
    models, searches = ({place for place in shared if (place[0] == "trained") == trained} for trained in (True, False))
    assert len(searches) == 4 * len(models) > 0
    assert all(first[place]["digest"] == second[place]["digest"] for place in models)
    assert all(first[place]["runs"] == second[place]["runs"] for place in searches)


def _results(record):
    """The results of the models and of the searches that train all weights, by study, arm and seed."""
    for run in answer.read(f"{record}/cells.jsonl.xz"):
        if run["study"] != "scratch" and run["factors"].get("trained", "all") == "all":
            yield (run["study"], run["arm"], run["seed"]), run["result"]


@pytest.mark.slow
def test_the_page_of_text_parts_has_the_numbers_of_its_record(found):
    text = (answer.RECORDS / "text_parts" / "README.md").read_text(encoding="utf-8")
    lines = [*answer.rows_of_text(found), *answer.sentences_of_text(found)]
    assert [line for line in lines if line not in text] == []


def test_the_page_of_changes_has_the_numbers_of_its_records():
    text = (ROOT / "docs" / "changes.md").read_text(encoding="utf-8")
    found, recall = answer.changes(), answer.changes("changes_recall")
    assert [sentence for sentence in answer.sentences_of_changes(found, recall) if sentence not in text] == []
    rows = [line for line in text.splitlines() if line.startswith("| ") and re.search("LESS|SAME|MORE|UNDECIDED", line)]
    assert len(rows) == 13
    for line, (name, numbers) in zip(rows, answer.rows_of_changes(found, recall).items(), strict=True):
        assert name in line and line.endswith(numbers)


def test_the_page_of_limits_has_the_numbers_of_its_bounds():
    found = answer.brackets(answer.read("limits/cells.jsonl.xz"))
    whole, adamw, sgd, wide = (answer.sides(found, *some) for some in ((), ("adamw",), ("sgd",), ("sgd", "128")))
    text = (answer.RECORDS / "limits" / "README.md").read_text(encoding="utf-8")
    assert f"{whole['between']} lie between them, {whole['below']} below and {whole['above']} above" in text
    assert f"With AdamW {adamw['between']} of 40 lie between and {adamw['below']} below" in text
    assert f"with SGD {sgd['between']} between and {sgd['above']} above" in text and wide["above"] == 8


@pytest.mark.parametrize(("high", "side"), [(0.9, "below"), (1.01, "between"), (2.1, "between"), (2.4, "above")])
def test_a_rate_is_outside_its_bounds_if_no_number_in_the_brackets_is_inside(high, side):
    ends = {"all": (high / 1.1, high), "qk": (2.0, 2.1), "rest": (2.0, 2.1)}
    count = answer.sides({("adamw", "inv_sqrt", "128", part, 0): of for part, of in ends.items()})
    assert count == {"below": 0, "between": 0, "above": 0} | {side: 1}


def test_a_run_that_ends_early_or_falls_is_not_stable():
    held = {"rate": 0.1, "nonfinite_step": None, "accuracy": [1.0] * 200}
    falls = {"accuracy": [1.0] * 100 + [0.0] + [1.0] * 99}
    runs = [held, held | {"nonfinite_step": 200}, held | {"accuracy": [1.0] * 199}, held | falls]
    assert [answer.is_stable(run, 200) for run in runs] == [True, False, False, False]


@pytest.mark.parametrize(("seeds", "ends"), [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (12, (3, 10))])
def test_the_range_of_a_median_has_at_least_95_percent(seeds, ends):
    assert answer.median(range(1, seeds + 1))[1:] == (*ends, seeds)


def test_the_files_that_the_tool_for_mutants_names_exist():
    tests = [*chain(*mutation.TESTS.values()), *mutation.MORE]
    named = [(ROOT / path, test) for path, _, test in (name.partition("::") for name in (*mutation.FILES, *tests))]
    assert [path for path, test in named if not path.exists() or (test and f"\ndef {test}(" not in path.read_text())] == []
