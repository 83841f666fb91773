"""What the recall tasks demand: two layers learn the tasks whose answer stands after its key, one layer does not."""

import pytest
import torch

from minitx.analysis import capture
from minitx.config import CallbacksConfig, RunConfig, TrainerConfig, node
from minitx.data.recall import answer_positions
from minitx.nn import build_model
from minitx.training.build import network_of, open_data
from minitx.training.optimizers import adamw, cosine
from minitx.training.run import train

TASKS = {  # the data, and how many steps
    "multi_query_recall": ({"num_keys": 8, "num_values": 4, "num_pairs": 4, "num_queries": 4}, 300),
    "induction": ({"num_tokens": 16, "segment_len": 6, "max_gap": 7}, 600),
}


def make_config(task, num_layers):
    data, steps = TASKS[task]
    sizes = {"embed_dim": 64, "num_heads": 1, "num_layers": num_layers, "ffn_dim": 128, "max_len": 32}
    return RunConfig(
        model=node(build_model, **sizes, activation="relu", position="rotary", init="lecun", tie_embeddings=False),
        data={"_target_": f"minitx.data.{task}", "val_size": 128, **data},
        optimizer=node(adamw, lr=3e-3),
        schedule=node(cosine, warmup_steps=15),
        trainer=TrainerConfig(max_steps=steps, accelerator="cpu", val_every=0, ckpt_every=steps, threads=1),
        callbacks=CallbacksConfig(progress=False),
    )


@pytest.mark.release
@pytest.mark.parametrize("task", TASKS)
def test_two_layers_solve_the_task_by_looking_at_the_answer(task, tmp_path):
    config = make_config(task, num_layers=2)
    assert train(config, tmp_path)["val_accuracy"] >= 0.99
    data = open_data(config)
    network = network_of(config.model, data).eval()
    weights = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    network.load_state_dict({name.removeprefix("network."): weight for name, weight in weights.items()})
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
    result = train(make_config(task, num_layers=1), tmp_path)
    assert result["val_accuracy"] < most
