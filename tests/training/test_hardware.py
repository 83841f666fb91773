"""Devices, precision, memory and peak speed of a machine, on machines that are made up."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from minitx.config import ConfigError, TrainerConfig
from minitx.training import hardware
from minitx.training.devices import check_processes, place_of
from minitx.training.hardware import check_count, cpu_precision, device_type, memory_mb, peak_tflops, widest_float


@pytest.fixture(autouse=True)
def _asked_anew():
    cpu_precision.cache_clear()
    yield
    cpu_precision.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """``machine(cuda=2, mps=False, amx_bf16=True)``: what torch says of the machine."""

    def make(cuda=0, mps=False, **capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    return make


@pytest.mark.parametrize(
    ("precision", "has"),
    [
        ("bf16-mixed", {"amx_bf16": True}),
        ("bf16-mixed", {"avx512_bf16": True}),
        ("bf16-true", {"bf16": True}),
        ("bf16-true", {"cuda": 1}),
        ("32-true", {}),
        ("64-true", {}),
    ],
)
def test_a_precision_stays_where_the_device_has_it(machine, precision, has):
    machine(**has)
    assert place_of(TrainerConfig(precision=precision))["precision"] == precision


def test_bf16_becomes_float32_on_another_cpu_and_one_line_says_so(machine, caplog):
    machine(avx2=True, amx_bf16=False)
    with caplog.at_level(logging.INFO, logger="minitx"):
        options = TrainerConfig(precision="bf16-mixed")
        assert {place_of(options)["precision"] for _ in range(6)} == {"32-true"}
    assert len(caplog.messages) == 1
    assert "trainer.precision=bf16-mixed" in caplog.messages[0]


@pytest.mark.parametrize(
    ("cuda", "mps", "accelerator", "found"),
    [
        (0, False, "auto", "cpu"),
        (2, False, "auto", "cuda"),
        (0, True, "auto", "mps"),
        (2, False, "cpu", "cpu"),
        (0, True, "cpu", "cpu"),
        (0, True, "gpu", "mps"),
        (1, False, "gpu", "cuda"),
    ],
)
def test_the_device_is_the_one_that_lightning_takes(machine, cuda, mps, accelerator, found):
    machine(cuda=cuda, mps=mps)
    options = TrainerConfig(accelerator=accelerator)
    assert device_type(options) == found


@pytest.mark.parametrize(
    ("cuda", "mps", "accelerator", "devices", "fits"),
    [
        (0, False, "gpu", 1, False),
        (1, False, "gpu", 2, False),
        (2, False, "gpu", 2, True),
        (0, True, "gpu", 1, True),
        (0, True, "auto", 1, True),
        (0, True, "auto", 2, False),
        (0, False, "auto", 1, True),
        (0, False, "auto", 2, False),
        (0, False, "cpu", 5, True),
    ],
)
def test_more_devices_than_there_are_are_refused(machine, cuda, mps, accelerator, devices, fits):
    machine(cuda=cuda, mps=mps)
    options = TrainerConfig(accelerator=accelerator, devices=devices)
    if fits:
        check_count(options)
    else:
        with pytest.raises(ConfigError, match=rf"trainer.devices={devices}"):
            check_count(options)


def test_float64_is_refused_on_apples_gpu_where_sums_are_float32(machine):
    machine(mps=True)
    with pytest.raises(ConfigError, match=r"trainer.precision=64-true"):
        check_count(TrainerConfig(precision="64-true"))
    assert [widest_float(torch.device(kind)) for kind in ("mps", "cpu", "cuda")] == [
        torch.float32,
        torch.float64,
        torch.float64,
    ]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("Quadro K600", None),
    ],
)
def test_the_peak_is_found_by_the_devices_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak
    assert peak_tflops(torch.device("cpu")) is None


def test_machines_that_decide_on_different_precisions_are_refused_on_every_one():
    strategy = SimpleNamespace(broadcast=lambda value: value, reduce_boolean_decision=lambda differs, all: True)
    with pytest.raises(ConfigError, match=r"trainer.precision=32-true"):
        check_processes(SimpleNamespace(precision="32-true", strategy=strategy, callbacks=[]))


def test_memory_is_counted_in_mebibytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * 2**20)
    assert memory_mb(torch.device("cuda")) == 7.0
    monkeypatch.setattr(hardware.sys, "platform", "linux")
    monkeypatch.setattr(hardware.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7 * 2**10))
    assert memory_mb(torch.device("cpu")) == 7.0
