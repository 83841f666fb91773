"""What each file in examples/ shows, asserted; and that the page prints what the files say."""

import csv
import re

import numpy as np
import pytest
import torch

from minitx.ablation.grid import cells
from minitx.cli.compose import compose_config, compose_grid
from minitx.config import TransformerConfig
from minitx.nn import MultiHeadAttention, ScoreScale, scale_multiplier
from minitx.training.run import train
from tests.cli.conftest import SHORT, TEXT
from tests.examples.conftest import ROOT

PAGE = ROOT / "docs" / "examples.md"


# a plain torch model


@pytest.mark.slow
def test_a_plain_loop_learns_recall_with_our_attention_and_nothing_without_it(ran):
    found = dict(ran("plain_torch")[0])
    assert found["with attention"] > 0.98
    guess = found["a guess among the digits of the row"]
    assert abs(found["without attention"] - guess) < 0.05
    assert guess == pytest.approx(1 / 6 + 5 / 6 / 10, abs=0.01)  # the place asked for, or another with the same digit by chance


# swaps


def test_gpt2_answers_the_same_with_our_attention_whole_padded_and_cached(ran):
    found = dict(ran("swap_gpt2")[0])
    assert found.pop("same tokens") is True
    assert len(found) == 8
    for what, difference in found.items():
        assert difference < (1e-12 if "float64" in what else 1e-5), what


def test_our_layers_are_what_runs_and_trains_in_gpt2(example):
    model, input_ids = example("swap_gpt2").their_model(torch.float64), torch.arange(2, 22).view(2, 10)
    example("swap_gpt2").swap(model)
    model(input_ids, labels=input_ids).loss.backward()
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    assert len(layers) == model.config.n_layer and all(layer.v_proj.weight.grad.abs().sum() > 0 for layer in layers)


def test_a_vision_transformer_answers_the_same_with_our_attention(ran):
    found = dict(ran("swap_vit")[0])
    differences = {what: value for what, value in found.items() if what.startswith("float")}
    assert len(differences) == 4
    for what, difference in differences.items():
        assert difference < (1e-12 if "float64" in what else 2e-6), what
    assert len(found) == 4 + 3  # a look at each of the three layers


def test_hidden_patches_change_no_logit_of_the_vision_transformer(example):
    """Polarity: True = hidden, as in torch; with the other one the class token would go."""
    vit = example("swap_vit").SmallViT().eval()
    example("swap_vit").swap(vit)
    images, hidden = torch.randn(2, 3, 16, 16), (torch.arange(17) == 16).expand(2, 17)
    other = images.clone()
    other[:, :, 12:, 12:] += 1.0  # the last patch
    with torch.no_grad():
        assert torch.equal(vit(images, hidden), vit(other, hidden))
        assert not torch.equal(vit(images), vit(other))


# a mask


def test_the_mask_says_what_the_paper_says(example):
    cells = [[cell == "x" for cell in line.split()] for line in example("custom_mask").sparse(4).grid(13).splitlines()]
    assert cells == [[j <= i and (i - j < 4 or (i - j) % 4 == 0) for j in range(13)] for i in range(13)]


def test_the_mask_gives_one_answer_on_every_backend_and_with_a_cache(ran):
    found = dict(ran("custom_mask")[0])
    errors = {name: error for name, error in found.items() if not isinstance(error, str)}
    assert {"sdpa", "chunked", "math", "cache"} <= set(errors)
    assert max(errors.values()) < 2e-6
    assert errors["cache"] < 1e-12


# a backend


def test_the_backend_passes_the_check_and_serves_a_model(ran):
    found = dict(ran("custom_backend")[0])
    assert (found["passed"], found["not tried"]) == (122, 60) and "failed" not in found  # it claims no bias, sinks and dropout
    assert found["difference"] < 1e-6
    assert "-> one_pass       can" in ran("custom_backend")[1]


# a scale


def test_the_arm_of_ones_own_is_what_it_says_at_every_head_dim():
    folder = ROOT / "examples" / "custom_scale"
    grid = compose_grid([f"--config-dir={folder}", "experiment=scaling_ablation", "ablation=power_scale"])
    found = {}
    for cell in cells(grid):
        if cell.place.arm == "power" and cell.place.seed == 0:
            model = compose_config(cell.overrides).model.fields
            found[model.width_per_head] = scale_multiplier(model.scale, model.width_per_head)
    assert found == {8: pytest.approx(8**-0.75), 64: pytest.approx(64**-0.75)}


# a model of our blocks


@pytest.mark.slow
def test_a_few_steps_bring_the_loss_well_below_a_guess_and_the_model_goes_on_from_a_beginning(example, tmp_path):
    loss, text = example("gpt").main(steps=20, folder=tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        guess = float(next(csv.DictReader(file))["train_loss"])  # the table starts small: every character is as likely
    assert guess > 3.0 and loss < guess - 0.5
    assert text.startswith("And God said ")
    assert len(text) == len("And God said ") + 200  # more than the 64 positions that it knows


def test_no_position_sees_the_future(example):
    model = example("gpt").GPT(11).eval()
    torch.nn.init.normal_(model.token.weight)
    ids = torch.tensor([[1, 2, 3, 5, 7], [1, 2, 3, 9, 10]])
    with torch.no_grad():
        logits = model(ids)
    torch.testing.assert_close(logits[0, :3], logits[1, :3])
    assert (logits[0, 3:] - logits[1, 3:]).abs().max() > 0.1


# brackets


def test_the_answer_of_a_closing_bracket_is_the_last_open_one_at_no_fixed_distance(example):
    brackets = example("brackets")
    batch = brackets.batch(50, np.random.default_rng(0))
    distances = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        still_open = []
        for i, (symbol, label) in enumerate(zip(ids, labels, strict=True)):
            if symbol == brackets.CLOSE:
                distances.append(i - still_open[-1])
                assert label == ids[still_open.pop()]
            else:
                assert label == -100
                still_open.append(i)
    assert max(np.bincount(distances)) < 0.5 * len(distances)


@pytest.mark.slow
def test_the_model_of_brackets_trains_and_its_heads_are_compared_with_the_structure(example, tmp_path, capsys):
    found = example("brackets").main(steps=2, folder=tmp_path / "run")
    assert (tmp_path / "run" / "heads.png").is_file()
    assert capsys.readouterr().out.count("blocks.") == 13  # a line a head, and the best
    assert 0.0 < found["position"] < 0.5


# cost and heads


def test_the_cost_of_the_parts_is_drawn_and_attention_grows_as_the_square(example, tmp_path):
    small = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=1, max_len=7, backend="math")
    _, curves = example("cost").main(small, lengths=(8, 16), path=tmp_path / "cost.png")
    assert curves[0].exponents[0] == pytest.approx(2.0)
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_heads_of_a_checkpoint_are_scored_on_its_rows_and_on_a_treebank(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: tmp_path)
    heads, text, trees = example("heads"), tmp_path / "text.txt", tmp_path / "trees.conllu"
    text.write_text(TEXT * 60, encoding="utf-8")
    trees.write_text((ROOT / "tests" / "examples" / "data" / "few.conllu").read_text(encoding="utf-8") * 5, encoding="utf-8")
    words = [*SHORT, "evaluation.at_end=false", "data=text", f"data.path={text}", "data.context_len=24"]
    train(compose_config([*words, "data.tokenizer=bpe", "data.bpe_vocab_size=270"]), tmp_path / "run")
    last = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    capsys.readouterr()
    rows = heads.main(last, num_rows=5, path=tmp_path / "rows.png")
    assert len(rows.heads) == 6 and capsys.readouterr().out.count("blocks.") == 6
    assert {head.scores["previous"].excess.n for head in rows.heads} == {5}
    scores = example("syntax_heads").main(last, str(trees))
    assert len(scores) == 6 == capsys.readouterr().out.count("blocks.")


# the page


def test_every_example_is_on_the_page_with_its_command():
    page = PAGE.read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f"(../examples/{path.name})" in page, path.name
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:  # what draws another example's figures has no command
            assert f"python examples/{path.name}" in page, path.name
            assert f"python examples/{path.name}" in text, path.name
    assert "--config-dir=examples/custom_scale" in page


def test_the_page_shows_what_the_backend_of_its_own_prints(ran):
    """But for the digits of what is measured."""

    def plain(text):
        return re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "#", text).strip()

    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert plain(shown) == plain(ran("custom_backend")[1])


def test_a_scale_that_is_no_power_of_d_k_is_a_subclass_of_score_scale():
    """As docs/examples.md says: ``forward`` returns the query and a multiplier."""

    class Tempered(ScoreScale):
        def forward(self, query, counts=None):
            query, multiplier = super().forward(query, counts)
            return query, multiplier / 3.0

    torch.manual_seed(0)
    ours, plain = MultiHeadAttention(12, 3, scale=Tempered(head_dim=4)), MultiHeadAttention(12, 3, scale=4**-0.5 / 3.0)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), plain(x))


# adapters


@pytest.mark.slow
def test_adapters_learn_while_the_model_stays_frozen_and_merge_into_it(ran):
    found, _ = ran("lora")
    assert found["loss after"] < 1.0 < found["loss before"]
    assert found["share of numbers trained"] < 0.05
    assert found["merged minus adapted"] < 1e-4
