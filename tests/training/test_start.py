"""Weights to start from, under another score scale."""

import dataclasses

import pytest
import torch

from minitx.config import ConfigError, InitFrom, KeyValueDataConfig, RunConfig, TrainerConfig, TransformerConfig
from minitx.training.building import build_network, open_data
from minitx.training.run import train
from minitx.training.stored import load_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    config = RunConfig(
        model=TransformerConfig(embed_dim=16, num_heads=2, num_layers=2, max_len=32, init="lecun"),
        data=KeyValueDataConfig(batch_size=8, val_size=8),
        trainer=TrainerConfig(max_steps=3, accelerator="cpu", val_every=0),
    )
    train(config, folder)
    return config, folder / "checkpoints" / "last.ckpt"


def started(trained, fold, **model):
    config, path = trained
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, **model), init_from=InitFrom(path=str(path), fold_scale=fold)
    )
    return build_network(config, open_data(config)).eval()


@pytest.mark.parametrize("model", [{"scale": "unscaled"}, {"scale": "inv", "scale_factor": 3.0}, {}], ids=str)
def test_a_folded_start_is_the_function_of_the_checkpoint(trained, model):
    before = load_model(trained[1])[0]
    after = started(trained, True, **model)
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(after(ids), before(ids), rtol=0, atol=1e-5)
    assert after.config.scale == model.get("scale", "inv_sqrt")


@pytest.mark.parametrize(
    ("fold", "model"), [(False, {"scale": "unscaled"}), (True, {"scale": "learned"}), (True, {"scale": 0})]
)
def test_a_scale_that_is_not_or_cannot_be_folded_is_refused(trained, fold, model):
    with pytest.raises(ConfigError, match=r"scale|init_from\.path"):
        started(trained, fold, **model)
