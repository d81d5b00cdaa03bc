"""Packed linear layers: torch's products, and the same bits for a row in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernels.cpu.library import library
from kernels.linear.packed import PackedLinears

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler")
DTYPES = [torch.float32, torch.bfloat16]


def _layer(dtype: torch.dtype, *, bias: bool = True, width: int = 70, outputs: int = 37) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(width, outputs, bias=bias).to(dtype).requires_grad_(False)


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_torch(dtype: torch.dtype, bias: bool) -> None:
    layer, x = _layer(dtype, bias=bias), torch.randn(1, 9, 70).to(dtype)
    expected = layer.float()(x.float())
    layer.to(dtype)
    product = PackedLinears(dtype).layer(layer)(x)
    assert product.dtype is dtype
    assert product.shape == (1, 9, 37)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(product.float(), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    layer, x = PackedLinears(dtype).layer(_layer(dtype, width=256, outputs=512)), torch.randn(40, 256).to(dtype)
    together = layer(x)
    for row in range(40):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


@needs_kernels
def test_inputs_of_another_type_are_converted() -> None:
    layer = _layer(torch.float32)
    x = torch.randn(3, 70, dtype=torch.float64)
    product = PackedLinears(torch.float32).layer(layer)(x)
    assert product.dtype is torch.float64
    torch.testing.assert_close(product, layer(x.float()).double(), rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_weights_count_as_memory_of_the_layer(dtype: torch.dtype) -> None:
    layer = PackedLinears(dtype).layer(_layer(dtype, width=64, outputs=64))
    assert sum(parameter.nbytes for parameter in layer.parameters()) >= 64 * 64 * dtype.itemsize
