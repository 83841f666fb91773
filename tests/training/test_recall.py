"""What the recall tasks demand: two layers learn the tasks whose answer stands after its key, one layer does not."""

import pytest
import torch
from extra import QUIET

from minitx.analysis import capture
from minitx.cli.compose import compose_config
from minitx.data.recall import answer_positions
from minitx.training.build import open_data
from minitx.training.checkpoints import load_model
from minitx.training.run import train

TASKS = {  # the data, and how many steps
    "multi_query_recall": [
        "data.num_keys=8",
        "data.num_values=4",
        "data.num_pairs=4",
        "data.num_queries=4",
        "trainer.max_steps=300",
    ],
    "induction": ["data.num_tokens=16", "data.segment_len=6", "data.max_gap=7", "trainer.max_steps=600"],
}
REST = ["data.val_size=128", "data.batch_size=32", "model=recall", "model.position=rotary", "model.embed_dim=64"]
REST += ["optimizer.lr=3e-3", "schedule.warmup_steps=15", "trainer.val_every=0", "trainer.ckpt_every=1000", *QUIET]


def config_of(task, num_layers):
    return compose_config([f"data={task}", *TASKS[task], *REST, f"model.num_layers={num_layers}"])


@pytest.mark.release
@pytest.mark.parametrize("task", TASKS)
def test_two_layers_solve_the_task_by_looking_at_the_answer(task, tmp_path):
    config = config_of(task, 2)
    assert train(config, tmp_path)["val_accuracy"] >= 0.99
    data = open_data(config)
    network = load_model(tmp_path / "checkpoints" / "last.ckpt")[0].eval()
    batch = data.probe_batch(64)
    with torch.no_grad(), capture(network, what="weights") as seen:
        network(batch["input_ids"])
    position = answer_positions(batch)
    (weights,) = seen["blocks.1.attention.core"]  # (B, 1, L, S)
    on_answer = weights[:, 0].gather(2, position.clamp(min=0)[..., None])[..., 0]
    assert on_answer[position >= 0].mean() > 0.9


@pytest.mark.release
@pytest.mark.parametrize(("task", "most"), [("multi_query_recall", 0.65), ("induction", 0.25)])
def test_one_layer_does_no_better_than_a_guess_among_what_the_row_shows(task, most, tmp_path):
    result = train(config_of(task, 1), tmp_path)
    assert result["val_accuracy"] < most
