"""A LightningModule of the user's: trained as Lightning trains it, with the folder, checkpoints and loggers of a run."""

import copy
import json
import signal
import warnings

import extra
import lightning.pytorch as L
import pytest
import torch
from extra import last
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from minitx.config import CallbacksConfig, ConfigError, EvaluationConfig, ProbeConfig, SamplesConfig
from minitx.config.training import StopAtConfig
from minitx.data.task import Task
from minitx.training.callbacks import LastCheckpoint, StoppedError
from minitx.training.checkpoints import load_model
from minitx.training.evaluation import evaluate
from minitx.training.loggers import read_metrics
from minitx.training.run import quiet_lightning

ROWS, BATCH = 22, 4  # 6 batches an epoch


class Pairs(L.LightningDataModule):
    """Batches are tuples (x, y)."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.rows = TensorDataset(torch.randn(ROWS, 5, generator=draw), torch.randn(ROWS, 3, generator=draw))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=BATCH)

    val_dataloader = test_dataloader = train_dataloader


class Own(L.LightningModule):
    """Its own steps, optimizer and schedule. ``made`` is an object among its hyperparameters."""

    def __init__(self, made=torch.optim.Adam):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.1), nn.Linear(7, 3))

    def forward(self, x):
        return self.net(x)

    def share(self, batch, name):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log(name, loss, prog_bar=True)
        self.log("tokens", x.numel() / 2)
        return loss

    def training_step(self, batch, batch_idx):
        return self.share(batch, "train/loss")

    def validation_step(self, batch, batch_idx):
        self.share(batch, "val/loss")

    def test_step(self, batch, batch_idx):
        self.share(batch, "test/loss")

    def configure_optimizers(self):
        optimizer = self.hparams["made"](self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


class Manual(Own):
    """Two optimizers by hand: the first layer's makes two steps of three."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers()[: 1 + (batch_idx % 3 > 0)]:
            optimizer.zero_grad()
            self.manual_backward(self.share(batch, "train/loss"))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1, momentum=0.9) for i in (2, 0)]


def fit(folder, model=Own, data=None, **options):
    torch.manual_seed(11)
    return extra.fit(
        folder, data or Pairs(), model=model() if isinstance(model, type) else model, **{"log_every": 2, **options}
    )


@pytest.mark.parametrize(("kind", "clip", "accumulate"), [(Own, None, 1), (Own, 0.1, 4), (Manual, None, 1)])
def test_the_weights_are_those_of_lightnings_own_trainer(tmp_path, kind, clip, accumulate):
    torch.manual_seed(11)
    model = kind()
    plain = copy.deepcopy(model)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with quiet_lightning():
        options |= {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
        trainer = L.Trainer(accelerator="cpu", max_epochs=3, **options)
        L.seed_everything(0, verbose=False)
        trainer.fit(plain, Pairs())
    fit(tmp_path, model, max_epochs=3, clip=clip, accumulate=accumulate)
    for name, weight in plain.state_dict().items():
        assert weight.equal(model.state_dict()[name]), name
    assert last(tmp_path)["global_step"] == trainer.global_step


@pytest.mark.parametrize("every", [250, 6])  # with 6, the checkpoint is that of the last validation
@pytest.mark.parametrize("kind", [Own, Manual])
def test_a_run_resumes_where_its_epochs_ended(tmp_path, kind, every):
    class Exact(kind):
        def __init__(self):
            super().__init__()
            self.net[1] = nn.Identity()  # no random draws, whose state a LightningModule's run does not keep

    fit(tmp_path / "whole", Exact, max_epochs=4)
    fit(tmp_path / "run", Exact, max_epochs=2, ckpt_every=every)
    fit(tmp_path / "run", Exact, max_epochs=4, ckpt_path="last")
    whole, run = last(tmp_path / "whole"), last(tmp_path / "run")
    assert all(weight.equal(run["state_dict"][name]) for name, weight in whole["state_dict"].items())
    assert read_metrics(tmp_path / "run" / "metrics.csv") == read_metrics(tmp_path / "whole" / "metrics.csv")


STOP = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss", "patience": 1, "min_delta": 9.0}


def test_what_it_logs_is_in_the_files_and_decides_the_best_weights(tmp_path, caplog):
    caplog.set_level("INFO")
    options = {"callbacks": CallbacksConfig(progress=True, parts={"early": STOP}), "evaluation": EvaluationConfig(test="best")}
    result = fit(tmp_path, max_epochs=5, monitor="val/loss", **options)
    rows = read_metrics(tmp_path / "metrics.csv")
    losses = [row["val/loss"] for row in rows if row["val/loss"] is not None]
    assert len(losses) == 2 and result["steps"] == 12  # it was stopped after the second epoch
    assert {"train/loss", "val/loss", "test/loss"} <= set(result["metrics"]) and json.dumps(result)
    assert result["metrics"]["val/loss"] == losses[-1] and result["metrics"]["test/loss"] == pytest.approx(min(losses))
    assert "step 12/30" in caplog.text and "val/loss" in caplog.text and "do not apply" in caplog.text


VALIDATED = [(4, 4, [4, 8], True), (4, 0, [8], False), (2, 4, [3, 7, 8], False)]
"""Batches of a step, val_every, the steps with a validation (from 0), and whether they come later than val_every says."""


@pytest.mark.parametrize(("accumulate", "every", "steps", "late"), VALIDATED)
def test_validations_that_come_late_because_a_step_has_fewer_batches_are_told(tmp_path, caplog, accumulate, every, steps, late):
    class Plain(Own):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit(tmp_path, Plain, max_steps=9, accumulate=accumulate, val_every=every)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows if row["val/loss"] is not None] == steps
    assert ("validations come later" in caplog.text) == late


def test_without_the_monitored_metric_there_is_no_best_checkpoint_and_the_log_says_so(tmp_path, caplog):
    fit(tmp_path, max_epochs=1)
    assert "no best.ckpt: trainer.monitor=val_loss is not logged; what is logged: " in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]


EARLY = {"callbacks": CallbacksConfig(progress=False, parts={"early": STOP}), "extra": {"min_steps": 24}}
SAVED = [
    (Manual, {"max_epochs": 3, "val_every": 0, "ckpt_every": 10}, [10, 20, 30]),  # no validation after the first two epochs
    (Own, {"max_epochs": 5, "val_every": 6, "ckpt_every": 4, **EARLY}, [4, 8, 12, 16, 20, 24]),  # it would stop after step 12
    (Manual, {"max_steps": 17, "val_every": 0}, [6, 13, 18]),  # one update or two at once; the last come with a validation
]


@pytest.mark.parametrize(("kind", "options", "steps"), SAVED)
def test_checkpoints_are_written_when_they_are_due_wherever_validations_and_updates_fall(
    tmp_path, monkeypatch, kind, options, steps
):
    saved, save = [], LastCheckpoint._save
    monkeypatch.setattr(LastCheckpoint, "_save", lambda *args: (saved.append(args[1].global_step), save(*args)))
    fit(tmp_path, kind, **{"ckpt_every": 6, **options})
    assert saved == steps
    assert read_metrics(tmp_path / "metrics.csv")[-1]["val/loss"] is not None


@pytest.mark.filterwarnings("ignore:Total length of `DataLoader` across ranks is zero")
@pytest.mark.parametrize("loaders", [1, 2])
def test_a_signal_stops_a_run_whose_validation_loaders_are_empty(tmp_path, loaders):
    class Empty(Pairs):
        def val_dataloader(self):
            return [DataLoader([]) for _ in range(loaders)]

    class Stopped(Manual):
        def on_train_batch_end(self, *_):
            if self.trainer.global_step > 2:
                signal.raise_signal(signal.SIGTERM)

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            raise AssertionError

    with pytest.raises(StoppedError):
        fit(tmp_path, Stopped, Empty(), val_every=1, max_steps=18)
    assert last(tmp_path)["global_step"] < 9


def test_its_checkpoint_holds_no_objects_and_its_weights_load(tmp_path):
    model = Own()
    fit(tmp_path, model, max_epochs=1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert not {name for name in torch.load(path, weights_only=True) if "hyper" in name}
    loaded, _, state = load_model(path, model=Own())
    assert all(weight.equal(model.state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert state["model"]["_target_"].endswith("Own")
    with pytest.raises(ConfigError, match="Own is a LightningModule, which evaluates itself"):
        evaluate(loaded, Pairs())


def test_arguments_of_lightning_that_no_key_replaces_reach_it(tmp_path):
    extra = {"limit_train_batches": 3, "num_sanity_val_steps": 1, "gradient_clip_algorithm": "value"}
    assert fit(tmp_path, max_epochs=2, extra=extra)["steps"] == 6


def test_lightnings_warning_that_what_it_logs_is_of_one_process_alone_is_shown(tmp_path):
    class Told(Own):
        def on_train_end(self):
            warnings.warn("It is recommended to use `self.log('val/loss', ..., sync_dist=True)`", stacklevel=1)

    with pytest.warns(UserWarning, match="sync_dist=True"):
        fit(tmp_path, Told, max_epochs=1)


TASK = Task(name="mine", train=[{"input": torch.zeros(5), "labels": 1}], val=[{"input": torch.zeros(5), "labels": 1}])
REFUSED = {
    "trainer.stop_at": {"stop_at": StopAtConfig()},
    "trainer.overfit=true": {"overfit": True},
    "trainer.compile=true": {"compile": True},
    "trainer.strategy=sharded": {"strategy": "sharded"},
    "callbacks.probe.every": {"callbacks": CallbacksConfig(probe=ProbeConfig(every=1))},
    "callbacks.samples.every": {"callbacks": CallbacksConfig(samples=SamplesConfig(every=1))},
    "evaluation.at_end=true": {"evaluation": EvaluationConfig(at_end=True)},
    "data is a Task": {"data": TASK},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_belongs_to_our_own_training_step_is_refused(tmp_path, key):
    with pytest.raises(ConfigError, match=key):
        fit(tmp_path / "run", **{"max_epochs": 1, **REFUSED[key]})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("owner", "name", "said"), [(Own, "test_step", "Own has no test_step"), (Pairs, "test_dataloader", "no test split")]
)
def test_a_test_that_the_user_did_not_write_is_refused_before_training(tmp_path, monkeypatch, owner, name, said):
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=rf"^evaluation\.test=last: .*{said}$"):
        fit(tmp_path / "run", max_epochs=1, evaluation=EvaluationConfig(test="last"))


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_a_run_with_averaged_weights_goes_on_for_more_epochs_as_if_it_had_not_stopped(tmp_path):
    ema = CallbacksConfig(parts={"ema": {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.9}})
    first = Own()
    first.net[1] = nn.Identity()  # as above
    models = {name: copy.deepcopy(first) for name in ("whole", "half", "rest")}
    fit(tmp_path / "whole", models["whole"], max_epochs=4, callbacks=ema)
    fit(tmp_path / "half", models["half"], max_epochs=2, callbacks=ema)
    fit(tmp_path / "rest", models["rest"], max_epochs=4, callbacks=ema, ckpt_path=str(tmp_path / "half/checkpoints/last.ckpt"))
    for name, weight in models["whole"].state_dict().items():
        assert weight.equal(models["rest"].state_dict()[name]), name


def test_what_lightning_refuses_is_a_mistake_in_the_config(tmp_path):
    with pytest.raises(ConfigError, match="clipping is not supported for manual optimization"):
        fit(tmp_path / "run", Manual(), max_epochs=1, clip=1.0)
