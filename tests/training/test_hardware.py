"""Which precision a CPU gets, and what is said about it."""

from __future__ import annotations

import logging

import pytest
import torch

from minitx.config import TrainerConfig
from minitx.training import hardware
from minitx.training.devices import place_of
from minitx.training.hardware import bf16_speed, cpu_precision


@pytest.fixture(autouse=True)
def _asked_anew():
    cpu_precision.cache_clear()
    yield
    cpu_precision.cache_clear()


@pytest.mark.parametrize(("speed", "chosen"), [(3.7, "bf16-mixed"), (1.2, "bf16-mixed"), (1.19, "32-true"), (0.01, "32-true")])
def test_bf16_runs_on_a_cpu_where_it_is_measured_to_pay_and_the_reason_is_logged_once(monkeypatch, caplog, speed, chosen):
    asked = []
    monkeypatch.setattr(hardware, "bf16_speed", lambda: (asked.append(1), speed)[1])
    with caplog.at_level(logging.INFO, logger="minitx"):
        options = TrainerConfig(precision="bf16-mixed", accelerator="cpu")
        assert [place_of(options)["precision"] for _ in range(3)] == [chosen] * 3
    assert len(asked) == 1
    (said,) = caplog.messages
    assert said.startswith(f"trainer.precision=bf16-mixed runs as {chosen}: a matrix product in bfloat16 is {speed:.2g} times")


@pytest.mark.parametrize(("precision", "on_cpu"), [("32-true", True), ("64-true", True), ("bf16-true", False)])
def test_other_precisions_and_accelerators_are_taken_at_their_word_without_measuring(monkeypatch, caplog, precision, on_cpu):
    monkeypatch.setattr(hardware, "bf16_speed", lambda: pytest.fail("measured"))
    monkeypatch.setattr("minitx.training.devices.runs_on_cpu", lambda options: on_cpu)
    assert place_of(TrainerConfig(precision=precision))["precision"] == precision
    assert not caplog.messages


def test_the_measurement_tells_the_faster_dtype_and_draws_no_random_number(monkeypatch):
    """On a clock that a product in float32 moves by 6 and one in bfloat16 by 2, whatever the machine."""
    clock, real, state = [0.0], torch.mm, torch.random.get_rng_state()

    def mm(a, b):
        clock[0] += {torch.float32: 6.0, torch.bfloat16: 2.0}[a.dtype]
        return real(a, b)

    monkeypatch.setattr(hardware.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "mm", mm)
    assert bf16_speed(size=5, repeats=2) == 3.0
    assert torch.equal(torch.random.get_rng_state(), state)
