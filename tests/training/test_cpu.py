"""Faster products on a CPU: as exact as torch's own, only while they are asked for."""

import pytest
import torch

from minitx.training import devices

SHAPES = [(131, 251, 127), (257, 127, 67), (1, 2053, 1031), (2053, 1031, 1), (3, 5, 7)]


@pytest.fixture
def anywhere(monkeypatch):
    """oneDNN's products, whatever the processor is."""
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch cannot replace a kernel")
    monkeypatch.setattr(devices, "_is_faster", lambda: devices._is_exact())
    with devices.onednn_products() as active:
        if not active:
            pytest.skip("this processor rounds to bfloat16, or a setting of the user's counts")
        yield


def error(rows, inner, columns, dtype, product):
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    return float((product(left, right).double() - left.double() @ right.double()).abs().max())


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
    assert error(*shape, torch.float32, forms[form]) < band
    assert error(*shape, torch.float64, forms[form]) < 1e-11


def test_a_product_of_shapes_that_do_not_fit_is_refused_as_by_torch(anywhere):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.randn(257, 127) @ torch.randn(128, 131)


def test_nothing_is_left_changed_afterwards(anywhere):
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    assert devices._active
    with pytest.raises(ValueError, match="within"), devices.onednn_products():
        raise ValueError("within")
    assert devices._active  # of the fixture


def test_a_setting_of_the_users_counts(monkeypatch):
    monkeypatch.setattr(devices, "_is_faster", lambda: True)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        with devices.onednn_products() as active:
            assert not active
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_a_processor_that_rounds_is_left_alone(monkeypatch):
    monkeypatch.setattr(devices, "_onednn", lambda: torch.autocast("cpu", torch.bfloat16))
    assert not devices._is_exact()
