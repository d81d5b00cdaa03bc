"""A linear layer in Triton whose results have the same bits in any batch, unlike those of cuBLAS.

cuBLAS chooses its kernel, and so the order of a sum, by the number of rows. Here a program adds up all inputs of its
outputs in their order, as many at a time whatever the tile. The reference is torch's `linear`.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from kernels.linear.base import LinearMethod
from kernels.shared_memory import has_large_shared_memory

__all__ = ["FixedOrderLinear", "TritonLinears", "linear_triton"]

# A tile and how it is computed, by the bytes of an element. More inputs of float32 would spill registers, and so would
# fewer warps where each element has its address, which Triton avoids if it knows that a row is a multiple of 16.
_TILES = {
    2: {"BLOCK_ROWS": 64, "BLOCK_OUTPUTS": 64, "BLOCK_INPUTS": 64, "num_stages": 5, "num_warps": 4},
    4: {"BLOCK_ROWS": 64, "BLOCK_OUTPUTS": 64, "BLOCK_INPUTS": 16, "num_stages": 2, "num_warps": 4},
}
_ODD_TILE = {"BLOCK_ROWS": 64, "BLOCK_OUTPUTS": 64, "BLOCK_INPUTS": 64, "num_stages": 4, "num_warps": 8}
# Of many rows: an H200 takes two thirds of the time. The sums are the same, 64 inputs at a time.
_LARGE_TILE = {"BLOCK_ROWS": 128, "BLOCK_OUTPUTS": 128, "BLOCK_INPUTS": 64, "num_stages": 4, "num_warps": 8}
_MANY_ROWS = 512


# The number of rows changes from step to step, which must not wait for a compilation.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    output,  # [num_rows, num_outputs], contiguous
    rows,  # [num_rows, num_inputs]
    weight,  # [num_outputs, num_inputs], contiguous
    bias,  # [num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """One program computes a tile of outputs. Neighbours share their weights, which the L2 cache then has."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    row = tl.program_id(0) % num_row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(0) // num_row_tiles * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)[None, :]
    has_row, has_column = row < num_rows, column < num_outputs
    inputs = tl.arange(0, BLOCK_INPUTS)
    x_tile = rows + row.to(tl.int64) * row_stride + inputs[None, :]
    w_tile = weight + column.to(tl.int64) * num_inputs + inputs[:, None]
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_INPUTS):
        is_input = inputs < num_inputs - start
        x = tl.load(x_tile, mask=has_row & is_input[None, :], other=0.0)
        w = tl.load(w_tile, mask=has_column & is_input[:, None], other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
        x_tile += BLOCK_INPUTS
        w_tile += BLOCK_INPUTS
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)
    result = sums.to(output.dtype.element_ty)
    tl.store(output + row.to(tl.int64) * num_outputs + column, result, mask=has_row & has_column)


def linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` [..., num_inputs] times ``weight`` [num_outputs, num_inputs], plus ``bias``, [..., num_outputs]."""
    num_outputs, num_inputs = weight.shape
    rows = x.reshape(-1, num_inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    assert weight.is_contiguous()
    output = rows.new_empty(len(rows), num_outputs)
    tile = _tile(rows)
    grid = triton.cdiv(len(rows), tile["BLOCK_ROWS"]) * triton.cdiv(num_outputs, tile["BLOCK_OUTPUTS"])
    if grid:
        linear_kernel[(grid,)](
            output,
            rows,
            weight,
            weight if bias is None else bias,
            len(rows),
            num_outputs,
            num_inputs,
            rows.stride(0),
            HAS_BIAS=bias is not None,
            **tile,
            enable_fp_fusion=True,
        )
    return output.view(*x.shape[:-1], num_outputs)


def _tile(rows: torch.Tensor) -> dict[str, int]:
    """Return the tile for [num_rows, num_inputs]."""
    num_rows, num_inputs = rows.shape
    if rows.element_size() == 2 and num_inputs % 16:
        return _ODD_TILE
    if rows.element_size() == 2 and num_rows > _MANY_ROWS and has_large_shared_memory(rows.device):
        return _LARGE_TILE
    return _TILES[rows.element_size()]


class FixedOrderLinear(nn.Module):
    """A linear layer by ``linear_triton``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return linear_triton(x, self.weight, self.bias)


class TritonLinears(LinearMethod):
    """Keeps the weights as they are, and adds up each sum in one order."""

    name = "triton"

    def layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with the weights of ``linear``."""
        return FixedOrderLinear(linear)
