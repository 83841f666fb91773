"""The LightningDataModule of the project: the 1,797 handwritten digits of scikit-learn, as tuples (picture, label)."""

import torch
from lightning import LightningDataModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class DigitsDataModule(LightningDataModule):
    """Split the digits at random. ``batch_size`` is the total over all devices."""

    def __init__(self, train_val_test_split: tuple[int, int, int] = (1297, 250, 250), batch_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.splits: list[Dataset] = []
        self.batch_size_per_device = batch_size

    def setup(self, stage: str) -> None:
        """Load and split the digits, once."""
        if self.trainer is not None:
            if self.hparams["batch_size"] % self.trainer.world_size:
                raise RuntimeError(
                    f"batch_size {self.hparams['batch_size']} is not divisible by {self.trainer.world_size} devices"
                )
            self.batch_size_per_device = self.hparams["batch_size"] // self.trainer.world_size
        if not self.splits:
            pictures, labels = load_digits(return_X_y=True)
            data = TensorDataset(torch.tensor(pictures / 16, dtype=torch.float32), torch.tensor(labels))
            sizes = self.hparams["train_val_test_split"]
            self.splits = random_split(data, sizes, generator=torch.Generator().manual_seed(42))

    def train_dataloader(self) -> DataLoader:
        """Return shuffled batches."""
        return DataLoader(self.splits[0], self.batch_size_per_device, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation batches."""
        return DataLoader(self.splits[1], self.batch_size_per_device)

    def test_dataloader(self) -> DataLoader:
        """Return the test batches."""
        return DataLoader(self.splits[2], self.batch_size_per_device)
