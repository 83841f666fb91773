"""examples/gpt.py: a model made of our blocks that our trainer trains."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TRAIN = str(Path(__file__).resolve().parents[2] / "scripts" / "train.py")
STEPS = 30


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory):
    """A short run, what the model was called with in training mode (B, L, and its V), and the loss of a guess, ln V."""
    gpt, folder, seen = example("gpt"), tmp_path_factory.mktemp("gpt"), []

    class Watched(gpt.GPT):
        def forward(self, input_ids):
            if self.training:
                seen.append((*input_ids.shape, self.token.num_embeddings))
            return super().forward(input_ids)

    gpt.GPT = Watched
    loss, text = gpt.main(steps=STEPS, folder=folder)
    return SimpleNamespace(folder=folder, loss=loss, text=text, seen=seen, guess=math.log(seen[0][-1]))


def test_a_few_steps_bring_the_loss_well_below_a_guess_among_all_characters(trained):
    with (trained.folder / "metrics.csv").open() as file:
        first = float(next(csv.DictReader(file))["train_loss"])
    assert first == pytest.approx(trained.guess, abs=0.1)  # the table starts small, so every character is as likely
    assert trained.loss < trained.guess - 0.5


def test_the_trainer_calls_the_model_once_a_step_with_its_batch(trained):
    assert [call[:2] for call in trained.seen] == [(32, 64)] * STEPS


def test_the_model_goes_on_from_the_beginning_that_it_is_given(trained):
    assert trained.text.startswith("And God said ")
    assert len(trained.text) == len("And God said ") + 200  # more than the 64 positions that it knows


def test_no_position_sees_the_future(example):
    model = example("gpt").GPT(11).eval()
    torch.nn.init.normal_(model.token.weight)
    ids = torch.tensor([[1, 2, 3, 5, 7], [1, 2, 3, 9, 10]])
    with torch.no_grad():
        logits = model(ids)
    torch.testing.assert_close(logits[0, :3], logits[1, :3])
    assert (logits[0, 3:] - logits[1, 3:]).abs().max() > 0.1


@pytest.mark.slow
def test_the_command_line_trains_it_as_its_docstring_says(python, tmp_path):
    command = ["~model", "+model._target_=gpt.GPT", "data=kjv", "trainer.max_steps=2", "schedule.warmup_steps=1"]
    done = python(TRAIN, *command, f"output_dir={tmp_path / 'out'}", "trainer.val_every=0", "trainer.val_batches=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt").exists()
