"""Numbers of papers: the measurements are right, and the pages show what was recorded."""

import json
import re
import sys

import pytest
import torch
from torch import nn

from minitx.data.seeding import generator
from minitx.nn import DotProductAttention, MultiHeadAttention
from tests.examples.conftest import ROOT, scripts

DOCS = ROOT / "docs"
PAGE = DOCS / "why_scale" / "published.md"
NAMES = ("published_sharpness", "published_logit_step", "published_depth")

published, sharpness, logit_step, depth = scripts("published", *NAMES)


# The measurements


def test_the_preconditioner_is_what_adam_divides_its_first_moment_by():
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    for _ in range(3):
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer.zero_grad()
        model(torch.randn(7, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    step = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    moment = torch.cat([optimizer.state[parameter]["exp_avg"].flatten() for parameter in model.parameters()])
    torch.testing.assert_close(step, -0.01 * moment / sharpness.preconditioner(optimizer))


def test_lanczos_finds_the_largest_eigenvalue_of_the_preconditioned_hessian():
    """Against the whole Hessian of attention, whose P⁻¹H is not symmetric."""
    attention = MultiHeadAttention(4, 1, core=DotProductAttention(backend="math")).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    names, weights = zip(*attention.named_parameters(), strict=True)
    diagonal = torch.rand(sum(weight.numel() for weight in weights), dtype=torch.float64) + 0.1

    def loss(flat):
        parts = [part.view_as(weight) for part, weight in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]
        return torch.func.functional_call(attention, dict(zip(names, parts, strict=True)), x).pow(4).mean()

    hessian = torch.autograd.functional.hessian(loss, nn.utils.parameters_to_vector(weights).detach())
    wanted = torch.linalg.eigvals(hessian / diagonal[:, None]).real.max().item()
    found = sharpness.sharpness(attention(x).pow(4).mean(), weights, diagonal, steps=30)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_the_paper_s_number_is_where_momentum_on_a_quadratic_becomes_unstable():
    """With P held at 1 and β₁ = 0.9."""
    for product, is_stable in ((sharpness.PAPER - 0.5, True), (sharpness.PAPER + 0.5, False)):
        place, moment = 1.0, 0.0
        for _ in range(4000):
            moment = 0.9 * moment + 0.1 * product * place  # the gradient times η
            place -= moment
        assert (abs(place) < 1.0) == is_stable


@pytest.mark.slow
def test_both_arms_start_as_one_function_and_their_sharpness_is_measured_five_times():
    record = sharpness.measure(**sharpness.QUICK)
    assert [len(seeds) for seeds in record["found"].values()] == [1, 1]
    with_scale, without = (seeds[0] for seeds in record["found"].values())
    assert len(with_scale["product"]) == len(without["product"]) == 5
    assert min(with_scale["product"]) > 0 and max(with_scale["product"]) < 38  # 40 small steps are far from the edge
    assert sharpness.table(record).count("\n") == 4


def test_the_models_of_both_arms_answer_alike():
    model = sharpness.solved(0, width=32)
    batch = sharpness.TASK.train(64, generator(0, "val"))
    scaled = sharpness.recall_loss(model, batch)
    unscaled = sharpness.recall_loss(sharpness.fold_scale(model), batch)
    assert model.config.scale == "unscaled"
    assert unscaled[0].item() == pytest.approx(scaled[0].item(), rel=1e-4) and unscaled[1] == scaled[1] > 0.9


def test_the_slopes_of_two_scales_differ_by_the_power_of_d_k_between_them():
    record = logit_step.measure(**logit_step.QUICK)
    changes = {case.split(", ")[1]: rows for case, rows in record["changes"].items()}
    for seed in range(2):
        slopes = {arm: published.slope(record["widths"], [steps[0] for steps in rows[seed]]) for arm, rows in changes.items()}
        assert slopes["inv_sqrt"] - slopes["inv"] == pytest.approx(0.5, abs=0.1)
        assert slopes["unscaled"] - slopes["inv"] == pytest.approx(1.0, abs=0.25)


def test_logits_that_no_weight_moves_do_not_change_and_small_steps_add_up():
    assert logit_step.logit_changes("4 keys", "inv_sqrt", 16, seed=0, rate=1e-30) == [0.0] * 4
    once, twice = (logit_step.logit_changes("4 keys", "inv_sqrt", 16, seed=0, steps=1, rate=rate)[0] for rate in (1e-4, 2e-4))
    assert twice == pytest.approx(2 * once, rel=0.02)


@pytest.mark.slow
def test_gradients_shrink_with_depth_with_pre_norm_and_not_with_post_norm():
    record = depth.measure(**depth.QUICK)
    slopes = {case: [published.slope(record["depths"], row) for row in rows] for case, rows in record["norms"].items()}
    assert max(slopes["pre, lecun, one position"]) < -0.3
    assert max(map(abs, slopes["post, lecun, one position"])) < 0.25
    assert depth.table(record).count("\n") == 2 + len(depth.CASES)


# The pages


def test_a_table_takes_the_place_of_the_one_before_and_the_text_around_it_stays(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("above\n\n<!-- mine -->\n| old |\n| --- |\n| 1 |\n\nbelow\n", encoding="utf-8")

    def table(record):
        return published.markdown(["new"], [[float(record["size"])]])

    monkeypatch.setattr(sys, "argv", ["mine.py", "--quick", "--output", str(page)])
    for _ in range(2):
        published.run("mine", lambda size=7: {"size": size}, table, {"size": 3})
        assert page.read_text(encoding="utf-8") == "above\n\n<!-- mine -->\n| new |\n| --- |\n| 3 |\n\nbelow\n"
    assert capsys.readouterr().out.count("| 3 |") == 2
    record = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert record["size"] == 3 and f"torch {torch.__version__}" in record["machine"]


def numbers(text):
    """The numbers of a text that were measured: those with a decimal point."""
    return set(re.findall(r"(?<![\w.:])-?\d+\.\d+(?![\w.])", text.replace("−", "-")))


@pytest.mark.parametrize("program", [sharpness, logit_step, depth], ids=NAMES)
def test_the_page_shows_the_table_of_the_record_and_names_the_machine(program):
    name, page = program.__name__, PAGE.read_text(encoding="utf-8")
    record = json.loads(PAGE.with_name(f"{name}.json").read_text(encoding="utf-8"))
    assert f"<!-- {name} -->\n{program.table(record)}\n" in page
    assert record["machine"] in page
    assert f"python examples/{name}.py --output docs/why_scale/published.md" in page


def test_every_measured_number_of_the_text_is_one_of_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    tables = "".join(re.findall(r"^\|.*\n", page, flags=re.MULTILINE))
    text = re.sub(r"\]\([^)]*\)|torch \S+|<!--.*?-->|^\|.*\n", "", page, flags=re.MULTILINE)
    assert numbers(text) and numbers(text) <= numbers(tables) | set(SETTINGS)


SETTINGS = ("0.1", "0.001", "0.0032", "0.95", "0.999", "0.9")
"""Rates, smoothing and decay rates, which are no results."""
