"""The LightningModule of the project: its steps, its metrics, its optimizer and its schedule."""

from typing import Any

import torch
from lightning import LightningModule
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy

Batch = tuple[torch.Tensor, torch.Tensor]


class DigitsLitModule(LightningModule):
    """Classifies pictures with ``net``. ``optimizer`` and ``scheduler`` are partial functions."""

    def __init__(self, net: torch.nn.Module, optimizer: Any, scheduler: Any = None, compile: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=10)
        self.val_acc = Accuracy(task="multiclass", num_classes=10)
        self.test_acc = Accuracy(task="multiclass", num_classes=10)
        self.val_loss = MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.net(x)

    def setup(self, stage: str) -> None:
        """Compile the network where that was asked for."""
        if self.hparams["compile"] and stage == "fit":
            self.net = torch.compile(self.net)

    def model_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return loss, predictions and labels of a batch."""
        x, y = batch
        logits = self(x)
        return self.criterion(logits, y), logits.argmax(dim=1), y

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss, predictions, labels = self.model_step(batch)
        self.train_acc(predictions, labels)
        self.log("train/loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of validation."""
        loss, predictions, labels = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predictions, labels)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the best accuracy so far."""
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of the test split."""
        _, predictions, labels = self.model_step(batch)
        self.test_acc(predictions, labels)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Build the optimizer, and the schedule where there is one."""
        optimizer = self.hparams["optimizer"](params=self.trainer.model.parameters())
        if self.hparams["scheduler"] is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams["scheduler"](optimizer=optimizer)
        settings = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": settings}
