"""What the recall tasks demand: two layers learn the tasks whose answer stands after its key, one layer does not."""

import pytest
import torch
from extra import QUIET

from minitx.analysis import capture
from minitx.cli.compose import compose_config
from minitx.data.datamodule import open_data
from minitx.data.recall import answer_positions
from minitx.training.checkpoints import load_model
from minitx.training.run import train

TASKS = {  # the data, how many steps, and the most that one layer gets right: a guess among what the row shows
    "multi_query_recall": ("data.num_keys=8 data.num_values=4 data.num_pairs=4 data.num_queries=4 trainer.max_steps=300", 0.65),
    "induction": ("data.num_tokens=16 data.segment_len=6 data.max_gap=7 trainer.max_steps=600", 0.25),
}
REST = ["data.val_size=128", "data.batch_size=32", "model=recall", "model.position=rotary", "model.embed_dim=64"]
REST += ["optimizer.lr=3e-3", "schedule.warmup_steps=15", "trainer.val_every=0", "trainer.ckpt_every=1000", *QUIET]


@pytest.mark.release
@pytest.mark.parametrize("task", TASKS)
def test_two_layers_solve_the_task_by_looking_at_the_answer_and_one_layer_does_not(task, tmp_path):
    words, most = TASKS[task]
    one, two = (compose_config([f"data={task}", *words.split(), *REST, f"model.num_layers={n}"]) for n in (1, 2))
    assert train(one, tmp_path / "one")["val_accuracy"] < most
    assert train(two, tmp_path / "two")["val_accuracy"] >= 0.99
    network = load_model(tmp_path / "two" / "checkpoints" / "last.ckpt")[0].eval()
    batch = open_data(two.data, two.trainer, seed=two.seed).probe_batch(64)
    with torch.no_grad(), capture(network, what="weights") as seen:
        network(batch["input_ids"])
    position = answer_positions(batch)
    (weights,) = seen["blocks.1.attention.core"]  # (B, 1, L, S)
    on_answer = weights[:, 0].gather(2, position.clamp(min=0)[..., None])[..., 0]
    assert on_answer[position >= 0].mean() > 0.9
