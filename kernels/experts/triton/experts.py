"""Experts in Triton: a program multiplies a tile of one expert's tokens with some of its outputs.

Imported on the first use on a GPU, so that a CPU needs no Triton. The contract is `experts.routed_experts`.
Nothing waits for the device, and no shape depends on the routing, so a CUDA graph can hold it: programs beyond the last
tile end at once.

A token's result has the same bits in any batch. A tile has as many rows for one token as for thousands. A program adds
up all inputs in their order, and a token's experts are added up from the most probable one on. Of weights that stay
codes (coded_experts.py) that is true with ``batch_invariant``; else a tile has as many rows as suit the batch.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernels.experts.coded_stack import CodedStack
from kernels.experts.route import Scores
from kernels.experts.triton.activation import gated_product
from kernels.experts.triton.coded_experts import coded_tile_rows, grouped_coded_linear
from kernels.experts.triton.routing import TILE_ROWS, Routes, route_triton
from kernels.layer_ops.base import Activation

__all__ = ["experts_triton"]

_COMBINED = 1024  # elements of a program
_NUM_STAGES = 3


# The number of tokens changes from step to step, and a step must not wait for a compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def grouped_linear_kernel(
    output,  # [num_pairs, num_outputs], contiguous
    rows,  # [num_pairs // PAIRS_PER_ROW, num_inputs], contiguous
    weights,  # [num_experts, num_outputs, num_inputs], contiguous; if gated, each expert's gate before its up
    pairs,  # of Routes, as all that follow
    num_pairs,
    tile_experts,
    tile_starts,
    row_weights,  # float32 [num_pairs], factors of the rows; or None
    num_tokens,
    num_outputs,
    num_inputs,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,  # the output is the activated gate * up
    IS_GELU: tl.constexpr,  # else the activation is SiLU
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """One program computes a tile of outputs. Neighbours are tiles of an expert, whose weights the L2 cache then has.

    A tile is as large for a decode as for a prompt; rows that do not exist are not read. By the data sheets, its
    multiplications of 16-bit numbers take a fifth of the time of reading the expert's weights on an H100, two fifths on
    an A100. In float32, without tensor cores, they take longer than reading.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert >= 0:
        at = tl.load(tile_starts + tile) + tl.arange(0, BLOCK_ROWS)[:, None]
        is_row = at < tl.load(num_pairs + expert)
        pair = tl.load(pairs + expert * num_tokens + at, mask=is_row, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)[None, :]
        is_column = column < num_outputs
        inputs = tl.arange(0, BLOCK_INPUTS)
        x_tile = rows + pair // PAIRS_PER_ROW * num_inputs + inputs[None, :]
        matrix = weights + expert * num_outputs * num_inputs * (2 if GATED else 1)
        w_tile = matrix + column.to(tl.int64) * num_inputs + inputs[:, None]
        to_up = num_outputs * num_inputs
        sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
        up = sums
        for start in range(0, num_inputs, BLOCK_INPUTS):
            is_input = inputs < num_inputs - start
            x = tl.load(x_tile, mask=is_row & is_input[None, :], other=0.0)
            is_weight = is_column & is_input[:, None]
            sums = tl.dot(x, tl.load(w_tile, mask=is_weight, other=0.0), sums, input_precision="ieee")
            if GATED:
                up = tl.dot(x, tl.load(w_tile + to_up, mask=is_weight, other=0.0), up, input_precision="ieee")
            x_tile += BLOCK_INPUTS
            w_tile += BLOCK_INPUTS
        if row_weights is not None:
            row_weight = tl.load(row_weights + pair, mask=is_row, other=0.0)
            sums *= row_weight
            up *= row_weight
        if GATED:
            sums = gated_product(sums, up, IS_GELU)
        tl.store(output + pair * num_outputs + column, sums.to(output.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def combine_kernel(
    output,  # [num_tokens, WIDTH], contiguous
    expert_outputs,  # [num_tokens, TOP_K, WIDTH], contiguous
    weights,  # float32 [num_tokens, TOP_K], contiguous
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up BLOCK elements of one token's experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        values = tl.load(expert_outputs + pair * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        sums += tl.load(weights + pair) * values
    tl.store(output + token * WIDTH + column, sums.to(output.dtype.element_ty), mask=mask)


def _tile_options(rows: torch.Tensor) -> dict[str, int]:
    """Return a tile and its warps: elements of 32 bits take more registers, and so do those that are loaded one by one.

    Triton loads several at once if it knows that a row is a multiple of 16 elements.
    """
    if rows.element_size() == 2 and rows.shape[1] % 16 == 0:
        return {"BLOCK_OUTPUTS": 64, "BLOCK_INPUTS": 64, "num_warps": 4}
    return {"BLOCK_OUTPUTS": 32, "BLOCK_INPUTS": 16, "num_warps": 8}


def _grouped_linear(
    rows: torch.Tensor,
    weights: torch.Tensor | CodedStack,
    routes: Routes,
    *,
    gated: bool,
    is_gelu: bool = False,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each pair's row times its expert's weights, [num_pairs, num_outputs]; a row may serve several pairs.

    Args:
        row_weights: float32 [num_tokens, top_k], contiguous, factors of each pair's row; None: 1.
    """
    if isinstance(weights, CodedStack):
        return grouped_coded_linear(rows, weights, routes, gated=gated, is_gelu=is_gelu, row_weights=row_weights)
    assert rows.is_contiguous()
    assert weights.is_contiguous()
    assert routes.tile_rows == TILE_ROWS
    num_outputs = weights.shape[1] // (2 if gated else 1)
    num_pairs = routes.ids.numel()
    output = rows.new_empty(num_pairs, num_outputs)
    options = _tile_options(rows)
    grouped_linear_kernel[len(routes.tile_experts), triton.cdiv(num_outputs, options["BLOCK_OUTPUTS"])](
        output,
        rows,
        weights,
        routes.pairs,
        routes.num_pairs,
        routes.tile_experts,
        routes.tile_starts,
        row_weights,
        len(routes.ids),
        num_outputs,
        rows.shape[1],
        PAIRS_PER_ROW=num_pairs // len(rows),
        GATED=gated,
        IS_GELU=is_gelu,
        BLOCK_ROWS=TILE_ROWS,
        num_stages=_NUM_STAGES,
        enable_fp_fusion=True,
        **options,
    )
    return output


def _combine(expert_outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each token's weighted sum of ``expert_outputs`` [num_tokens * top_k, width], [num_tokens, width]."""
    (num_tokens, top_k), width = weights.shape, expert_outputs.shape[1]
    output = expert_outputs.new_empty(num_tokens, width)
    combine_kernel[num_tokens, triton.cdiv(width, _COMBINED)](
        output, expert_outputs, weights, WIDTH=width, TOP_K=top_k, BLOCK=_COMBINED, enable_fp_fusion=True
    )
    return output


def _tile_rows(hidden: torch.Tensor, up: torch.Tensor | CodedStack, down: torch.Tensor | CodedStack, top_k: int) -> int:
    """Return the rows of a tile, which both products share."""
    if isinstance(up, torch.Tensor) or isinstance(down, torch.Tensor) or up.batch_invariant:
        return TILE_ROWS
    return coded_tile_rows(len(hidden) * top_k / up.num_experts, hidden.dtype)


def experts_triton(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    up: torch.Tensor | CodedStack,
    down: torch.Tensor | CodedStack,
    top_k: int,
    *,
    normalize: bool,
    scores: Scores | None = None,
    gated: bool = True,
    activation: Activation = "silu",
    expert_scale: torch.Tensor | None = None,
    scales_inputs: bool = False,
) -> torch.Tensor:
    """Compute `kernels.experts.experts.routed_experts`, whose arguments it shares."""
    if len(hidden) == 0:
        return torch.empty_like(hidden)
    tile_rows = _tile_rows(hidden, up, down, top_k)
    choice = logits if scores is None else scores.choice(logits)
    routes = route_triton(choice, top_k, normalize=normalize, tile_rows=tile_rows)
    if scores is not None:
        routes = replace(routes, weights=scores.weights(logits, routes.ids.long(), normalize=normalize))
    if expert_scale is not None:
        routes = replace(routes, weights=routes.weights * expert_scale[routes.ids.long()])
    row_weights = None
    if scales_inputs:
        row_weights = routes.weights.contiguous()
        routes = replace(routes, weights=torch.ones_like(row_weights))
    activated = _grouped_linear(
        hidden.contiguous(), up, routes, gated=gated, is_gelu=activation == "gelu_tanh", row_weights=row_weights
    )
    if not gated:
        activated = activated.relu_().square_()
    return _combine(_grouped_linear(activated, down, routes, gated=False), routes.weights)
