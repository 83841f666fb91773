"""Devices, precision, memory and peak speed of a machine, on machines that are made up."""

import contextlib
import logging

import pytest
import torch

from minitx.config import ConfigError, TrainerConfig
from minitx.training.devices import check_count, cpu_precision, device_type, peak_tflops, widest_float
from minitx.training.run import place_of


@pytest.fixture
def machine(monkeypatch):
    """``machine(cuda=2, mps=False, amx_bf16=True)``: what torch says of the machine."""

    def make(cuda=0, mps=False, **capabilities):
        cpu_precision.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    yield make
    cpu_precision.cache_clear()


def test_bf16_stays_where_the_device_has_it_and_becomes_float32_on_another_cpu_with_one_line(machine, caplog):
    for has in ({"amx_bf16": True}, {"avx512_bf16": True}, {"bf16": True}, {"cuda": 1}):
        machine(**has)
        assert place_of(TrainerConfig(precision="bf16-true"))["precision"] == "bf16-true"
    machine(avx2=True, amx_bf16=False)
    with caplog.at_level(logging.INFO, logger="minitx"):
        assert {place_of(TrainerConfig(precision="bf16-mixed"))["precision"] for _ in range(6)} == {"32-true"}
    (said,) = caplog.messages
    assert "trainer.precision=bf16-mixed" in said


# CUDA's devices, is Apple's there, trainer.accelerator, trainer.devices; the kind that Lightning takes, or None where it is refused
MACHINES = [
    (0, False, "auto", 1, "cpu"), (0, False, "cpu", 5, "cpu"), (0, False, "gpu", 1, None), (2, False, "gpu", 2, "cuda"),
    (2, False, "cpu", 1, "cpu"), (1, False, "auto", 2, None), (0, True, "auto", 1, "mps"), (0, True, "auto", 2, None),
]  # fmt: skip


@pytest.mark.parametrize("case", MACHINES, ids=str)
def test_the_device_is_the_one_that_lightning_takes_and_more_than_there_are_is_refused(machine, case):
    cuda, mps, accelerator, devices, found = case
    machine(cuda=cuda, mps=mps)
    options = TrainerConfig(accelerator=accelerator, devices=devices)
    with contextlib.nullcontext() if found else pytest.raises(ConfigError, match=rf"trainer.devices={devices}"):
        check_count(options)
        assert device_type(options) == found


def test_float64_is_refused_on_apples_gpu_where_sums_are_float32(machine):
    machine(mps=True)
    with pytest.raises(ConfigError, match=r"trainer.precision=64-true"):
        check_count(TrainerConfig(precision="64-true"))
    kinds = [widest_float(torch.device(kind)) for kind in ("mps", "cpu", "cuda")]
    assert kinds == [torch.float32, torch.float64, torch.float64]


def test_the_peak_is_found_by_the_devices_name(monkeypatch):
    for name, peak in {"NVIDIA H100 PCIe": 756.0, "NVIDIA L40S": 362.0, "Quadro K600": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(torch.device("cuda")) == peak
