"""Products by oneDNN are those of `torch.mm`, in any layout, and whole processes can use them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from penstock.kernels.portable.products import MIN_MULTIPLICATIONS, is_faster, product

SHAPES = [
    (300, 128, 384),
    (256, 128, 64),
    (128, 300, 384),
    (1, 1024, 1024),
    (257, 131, 97),
    (3, 5, 7),
    (0, 4, 3),
    (4, 0, 3),
]


def layouts(rows: int, columns: int, rng: np.random.Generator) -> list[torch.Tensor]:
    """The same matrix: contiguous, transposed in memory, and a part of a larger one."""
    values = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    wide = torch.zeros(rows, columns + 3)
    wide[:, 1:-2] = values
    return [values, values.t().contiguous().t(), wide[:, 1:-2]]


@pytest.mark.some(3)
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_a_product_is_that_of_float64_up_to_rounding(rows: int, inner: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    for left in layouts(rows, inner, rng):
        for right in layouts(inner, columns, rng):
            expected = left.double().numpy() @ right.double().numpy()
            found = product(left, right)
            assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, columns), torch.float32, True)
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * max(inner, 1) ** 0.5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_ever_new_numbers_of_rows_take_no_more_memory_after_the_first_ones() -> None:
    left, right = torch.ones(2048, 96), torch.ones(96, 288)
    for rows in range(256, 2049, 128):
        product(left[:rows], right)
    before = psutil.Process().memory_info().rss
    for rows in range(257, 2049, 9):
        product(left[:rows], right)
    assert psutil.Process().memory_info().rss - before < 8 << 20, "199 numbers, which would keep 0.2 MiB each"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    left, right = (torch.arange(1 << 14).view(128, 128).remainder(7).to(dtype) for _ in range(2))
    assert left.shape[0] * right.numel() >= MIN_MULTIPLICATIONS
    assert torch.equal(product(left, right), torch.mm(left, right))


TRAINS = """
import torch
from penstock.kernels.portable import products
calls = []
counted = products.product
products.product = lambda left, right: calls.append(1) or counted(left, right)
assert products.use_onednn() is not None
torch.manual_seed(0)
layer = torch.nn.Linear(128, 384, bias=False)
inputs = torch.randn(4, 80, 128, requires_grad=True)
exact, of_exact = torch.nn.Linear(128, 384, bias=False).double(), inputs.detach().double().requires_grad_()
exact.load_state_dict(layer.state_dict())
layer(inputs).square().mean().backward()
exact(of_exact).square().mean().backward()
assert len(calls) >= 3, calls  # forward, and backward of the inputs and of the weight
torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-7)
torch.testing.assert_close(inputs.grad.double(), of_exact.grad, rtol=1e-4, atol=1e-9)
"""


@pytest.mark.skipif(not is_faster(), reason="MKL is as fast on this CPU")
def test_layers_of_a_process_that_uses_it_have_the_gradients_of_float64() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRAINS], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
