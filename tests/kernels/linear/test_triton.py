"""A linear layer in Triton against torch's, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(1, 64, 64), (3, 100, 30), (64, 64, 128), (65, 130, 66), (200, 17, 5)]  # rows, inputs, outputs


def operands(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, kernel_device: torch.device
) -> None:
    from kernels.linear.triton import linear_triton

    x, weight, bias = (operand.to(kernel_device) for operand in operands(*shape, dtype))
    expected = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    product = linear_triton(x, weight, bias if has_bias else None)
    assert product.dtype == dtype
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(product.double(), expected, atol=limit * float(expected.abs().max()), rtol=limit)


def test_strided_rows_and_no_rows(kernel_device: torch.device) -> None:
    from kernels.linear.triton import linear_triton

    x, weight, bias = (operand.to(kernel_device) for operand in operands(6, 40, 20, torch.float32))
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    assert torch.equal(linear_triton(wide[:, :40], weight, bias), linear_triton(x, weight, bias))
    assert torch.equal(linear_triton(x.t().contiguous().t(), weight, bias), linear_triton(x, weight, bias))
    assert linear_triton(x.view(2, 3, 40), weight, bias).shape == (2, 3, 20)
    assert linear_triton(x[:0], weight, bias).shape == (0, 20)


def test_a_row_gets_the_same_bits_in_any_batch(kernel_device: torch.device) -> None:
    from kernels.linear.triton import linear_triton

    x, weight, bias = (operand.to(kernel_device) for operand in operands(200, 96, 70, torch.float32))
    together = linear_triton(x, weight, bias)
    for start, end in ((0, 1), (63, 64), (64, 65), (130, 200), (199, 200), (5, 77)):
        assert torch.equal(linear_triton(x[start:end], weight, bias), together[start:end])
