"""Experts as a grouped product in Triton: a program multiplies a tile of one expert's tokens with some of its outputs.

Imported on the first use on a GPU, so that a CPU needs no Triton. The contract is `kernels.experts.experts`'. Nothing
waits for the device, and no shape depends on the routing, so a CUDA graph can hold it: programs beyond the last tile
end at once.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

__all__ = ["experts_triton"]

_BLOCK_OUTPUTS, _BLOCK_INPUTS = 64, 64
_FEW_ROWS, _MANY_ROWS = 16, 64  # of a tile; tensor cores multiply 16 at least


@triton.jit
def _grouped_linear_kernel(
    output,  # [num_pairs, num_outputs]
    rows,  # [num_pairs // PAIRS_PER_ROW, num_inputs]
    weights,  # [num_experts, num_outputs, num_inputs]
    pairs,  # int64 [num_pairs], sorted by expert
    tile_experts,  # int64; -1: there is no such tile
    tile_starts,  # int64, where in `pairs` a tile begins
    tile_ends,  # int64, where its expert's pairs end
    num_outputs,
    num_inputs,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        index = tl.load(tile_starts + tile) + tl.arange(0, BLOCK_ROWS)
        has_pair = (index < tl.load(tile_ends + tile))[:, None]
        pair = tl.load(pairs + index[:, None], mask=has_pair, other=0)
        column = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)[None, :]
        has_column = column < num_outputs
        row_start = rows + pair // PAIRS_PER_ROW * num_inputs
        weight_start = weights + expert * num_outputs * num_inputs + column * num_inputs
        sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
        for start in range(0, num_inputs, BLOCK_INPUTS):
            inputs = start + tl.arange(0, BLOCK_INPUTS)
            x = tl.load(row_start + inputs[None, :], mask=has_pair & (inputs < num_inputs)[None, :], other=0.0)
            w = tl.load(weight_start + inputs[:, None], mask=has_column & (inputs < num_inputs)[:, None], other=0.0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
        tl.store(output + pair * num_outputs + column, sums.to(output.dtype.element_ty), mask=has_pair & has_column)


@dataclass(frozen=True)
class _Tiles:
    """The pairs of a token and one of its experts, divided into tiles of one expert each."""

    pairs: torch.Tensor  # int64 [num_pairs], sorted by expert
    experts: torch.Tensor  # int64 [most tiles that there can be]; -1: there are fewer
    starts: torch.Tensor  # likewise, where in `pairs` a tile begins
    ends: torch.Tensor  # likewise, where its expert's pairs end
    block_rows: int

    @classmethod
    def of(cls, ids: torch.Tensor, num_experts: int) -> _Tiles:
        """Divide the pairs of ``ids`` [num_tokens, top_k]."""
        pairs = ids.flatten()
        block_rows = _FEW_ROWS if len(pairs) <= _FEW_ROWS * num_experts else _MANY_ROWS
        counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, pairs, torch.ones_like(pairs))
        ends = counts.cumsum(0)
        num_tiles = (counts + block_rows - 1) // block_rows
        tile_ends = num_tiles.cumsum(0)
        tiles = torch.arange(min(len(pairs), len(pairs) // block_rows + num_experts), device=ids.device)
        experts = torch.searchsorted(tile_ends, tiles, right=True)
        known = experts.clamp(max=num_experts - 1)
        starts = (ends - counts)[known] + (tiles - (tile_ends - num_tiles)[known]) * block_rows
        is_tile = experts < num_experts
        return cls(pairs.argsort(stable=True), known.where(is_tile, -1), starts, ends[known], block_rows)


def _grouped_linear(rows: torch.Tensor, weights: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """Return each pair's row times its expert's weights, [num_pairs, num_outputs]; a row may serve several pairs."""
    assert rows.is_contiguous()
    assert weights.is_contiguous()
    num_pairs, (_, num_outputs, num_inputs) = len(tiles.pairs), weights.shape
    output = torch.empty(num_pairs, num_outputs, dtype=rows.dtype, device=rows.device)
    _grouped_linear_kernel[triton.cdiv(num_outputs, _BLOCK_OUTPUTS), len(tiles.experts)](
        output,
        rows,
        weights,
        tiles.pairs,
        tiles.experts,
        tiles.starts,
        tiles.ends,
        num_outputs,
        num_inputs,
        PAIRS_PER_ROW=num_pairs // len(rows),
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        BLOCK_INPUTS=_BLOCK_INPUTS,
    )
    return output


def experts_triton(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute `kernels.experts.experts`, whose shapes it shares."""
    if len(hidden) == 0:
        return torch.empty_like(hidden)
    tiles = _Tiles.of(ids, len(gate_up))
    gate, up = _grouped_linear(hidden.contiguous(), gate_up, tiles).chunk(2, dim=-1)
    outputs = _grouped_linear(F.silu(gate) * up, down, tiles).view(*ids.shape, -1)
    return (outputs.float() * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)
