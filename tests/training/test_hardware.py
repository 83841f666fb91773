"""Devices, precision and peak speed of a machine, on machines that are made up; faster products on a CPU, as exact as torch's own."""

import contextlib

import pytest
import torch

from minitx.config import ConfigError, TrainerConfig
from minitx.nn.precision import widest_float
from minitx.training import devices, onednn
from minitx.training.checkpoints import move_to_device
from minitx.training.devices import (
    PEAK_TFLOPS,
    check_count,
    count_devices,
    cpu_precision,
    device_name,
    device_of,
    kind_of_device,
    memory_mb,
    peak_of,
)
from minitx.training.trainer import device_arguments


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
        assert device_arguments(TrainerConfig(precision="bf16-true"))["precision"] == "bf16-true"
    machine(avx2=True, amx_bf16=False)
    caplog.set_level("INFO", "minitx")
    assert {device_arguments(TrainerConfig(precision="bf16-mixed"))["precision"] for _ in range(6)} == {"32-true"}
    (said,) = caplog.messages
    assert "trainer.precision=bf16-mixed" in said


# CUDA's devices, is Apple's there, trainer.accelerator, trainer.devices; the kind that Lightning takes, or None where it is refused
MACHINES = [
    (0, False, "auto", 1, "cpu"), (0, False, "cpu", 5, "cpu"), (0, False, "gpu", 1, None), (2, False, "gpu", 2, "cuda"),
    (2, False, "cpu", 1, "cpu"), (1, False, "auto", 2, None), (0, True, "auto", 1, "mps"), (0, True, "auto", 2, None),
]  # fmt: skip


class Moved(torch.nn.Module):
    """A model that is not moved."""

    def to(self, device):
        return device


@pytest.mark.parametrize("case", MACHINES, ids=str)
def test_kind_and_number_of_devices_follow_from_what_the_machine_has(case):
    cuda, mps, accelerator, devices, found = case
    kind, (_, most) = kind_of_device(accelerator, cuda, mps), count_devices(accelerator, cuda, mps)
    assert (devices <= most) == (found is not None)
    assert found is None or kind == found


@pytest.mark.parametrize("case", MACHINES, ids=str)
def test_the_device_is_the_one_that_lightning_takes_and_more_than_there_are_is_refused(machine, case):
    cuda, mps, accelerator, devices, found = case
    machine(cuda=cuda, mps=mps)
    options = TrainerConfig(accelerator=accelerator, devices=devices)
    with contextlib.nullcontext() if found else pytest.raises(ConfigError, match=rf"trainer.devices={devices}"):
        check_count(options)
        assert device_of(accelerator).type == found
        assert accelerator != "auto" or move_to_device(Moved(), "auto").type == found  # device=auto of a program


def test_float64_is_refused_on_apples_gpu_where_sums_are_float32(machine):
    machine(mps=True)
    with pytest.raises(ConfigError, match=r"trainer.precision=64-true"):
        check_count(TrainerConfig(precision="64-true"))
    assert [widest_float(torch.device(kind)) for kind in ("mps", "cpu")] == [torch.float32, torch.float64]


PEAKS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L4": 121.0,
    "NVIDIA GeForce RTX 4090": 165.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "Quadro K600": None,
    "CPU": None,
}
"""As the drivers call the devices."""


def test_the_peak_is_found_by_the_devices_name(monkeypatch):
    assert {name: peak_of(name) for name in PEAKS} == PEAKS
    assert set(PEAK_TFLOPS.values()) <= set(PEAKS.values())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    assert peak_of(device_name(torch.device("cuda"))) == 362.0


def test_memory_is_counted_where_the_device_counts_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 * 2**20)
    assert [memory_mb(torch.device(kind)) for kind in ("cuda", "mps")] == [3.0, 5.0]
    assert memory_mb(torch.device("cpu")) > 10  # of the process


# --- denormal numbers

can_flush = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush")


def is_kept() -> bool:
    """Whether products of both kinds of threads, and of a backward pass, keep a number below 1.2e-38."""
    weights = torch.full((100_000,), 1e-39, requires_grad=True)
    (weights * 1e-39).sum().backward()
    assert bool((weights.grad != 0).all()) == bool((weights.grad != 0).any())  # all threads do the same
    return bool((weights.grad != 0).all())


@can_flush
@pytest.mark.parametrize("threads", [1, 2])
def test_denormal_numbers_are_zero_within_and_kept_before_and_afterwards(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert is_kept()
        with devices.flush_denormal():
            with devices.flush_denormal():
                assert not is_kept()
            assert not is_kept()  # what was set before counts afterwards
        assert is_kept()
        with devices.flush_denormal(False):
            assert is_kept()
        with pytest.raises(ValueError, match="within"), devices.flush_denormal():
            raise ValueError("within")
        assert is_kept()
    finally:
        torch.set_num_threads(before)


@can_flush
@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_takes_denormal_numbers_for_zero_only_if_it_is_told_to(wanted):
    with devices.process_settings(TrainerConfig(accelerator="cpu", flush_denormal=wanted)):
        seen = is_kept()
    assert seen is not wanted and is_kept()


# --- products on a CPU

SHAPES = [(131, 251, 127), (1, 2053, 1031), (2053, 1031, 1), (3, 5, 7)]


@pytest.fixture
def anywhere(monkeypatch):
    """oneDNN's products, whatever the processor is."""
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch cannot replace a kernel")
    monkeypatch.setattr(onednn, "_is_faster", lambda: onednn._is_exact())
    with onednn.onednn_products() as active:
        if not active:
            pytest.skip("this processor rounds to bfloat16, or a setting of the user's counts")
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["plain", "transposed", "out", "linear"])
def test_products_are_as_exact_as_torchs_own(anywhere, shape, form):
    forms = {
        "plain": lambda left, right: left @ right,
        "transposed": lambda left, right: (right.t() @ left.t()).t(),
        "out": lambda left, right: torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1])),
        "linear": lambda left, right: torch.nn.functional.linear(left, right.t(), right.new_zeros(right.shape[1])),
    }
    band = 1e-6 * shape[1] ** 0.5 * 8  # a sum of ``inner`` products of normal numbers, in float32; bfloat16 is 1,000 times off
    for dtype, most in ((torch.float32, band), (torch.float64, 1e-11)):
        left, right = (torch.randn(sizes, dtype=dtype) for sizes in (shape[:2], shape[1:]))
        assert float((forms[form](left, right).double() - left.double() @ right.double()).abs().max()) < most


def test_a_product_of_shapes_that_do_not_fit_is_refused_as_by_torch(anywhere):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.randn(257, 127) @ torch.randn(128, 131)


def test_nothing_is_left_changed_afterwards(anywhere):
    assert torch.backends.mkldnn.matmul.fp32_precision == "none" and onednn._active
    with pytest.raises(ValueError, match="within"), onednn.onednn_products():
        raise ValueError("within")
    assert onednn._active  # of the fixture


def test_torchs_own_kernels_are_back_afterwards_also_of_one_block_within_another(monkeypatch):
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch cannot replace a kernel")
    monkeypatch.setattr(onednn, "_is_faster", lambda: True)
    kernels = [torch._C._dispatch_dump("aten::mm")]
    for wanted in ((True,), (True, False, True)):
        with contextlib.ExitStack() as stack:
            for each in wanted:
                stack.enter_context(onednn.onednn_products(each))
            kernels.append(torch._C._dispatch_dump("aten::mm"))
        assert torch._C._dispatch_dump("aten::mm") == kernels[0]
    assert kernels[1] != kernels[0] and kernels[2] == kernels[1]


def test_a_setting_of_the_users_counts(monkeypatch):
    monkeypatch.setattr(onednn, "_is_faster", lambda: True)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        with onednn.onednn_products() as active:
            assert not active
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_a_processor_that_rounds_is_left_alone(monkeypatch):
    monkeypatch.setattr(onednn, "_onednn", lambda: torch.autocast("cpu", torch.bfloat16))
    assert not onednn._is_exact()
