"""The contracts of the kernels of experts: what a launch must pass, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from kernels.experts.route import route
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor

__all__ = ["CONTRACTS", "grouped_product"]


def _check_routing(call: Any) -> None:
    num_tokens, num_experts = call.logits.shape
    require((num_tokens, num_experts) == (call.num_tokens, call.NUM_EXPERTS), "sizes do not match the logits")
    require(call.logits.stride() == (call.logits_stride, 1), f"{call.logits_stride} is not the stride of the logits")
    require_tensor("weights", call.weights, torch.float32, num_tokens, call.TOP_K)
    require_tensor("ids", call.ids, torch.int32, num_tokens, call.TOP_K)
    require(call.weights.is_contiguous() and call.ids.is_contiguous(), "weights or ids are not contiguous")
    for padded, size in ((call.EXPERTS_PADDED, call.NUM_EXPERTS), (call.TOP_K_PADDED, call.TOP_K)):
        require(padded >= size and padded & (padded - 1) == 0, f"{padded} is not a power of two from {size} on")


def _route(call: Any) -> None:
    weights, ids = route(plain(call.logits), call.TOP_K, normalize=call.NORMALIZES)
    plain(call.weights).copy_(weights)
    plain(call.ids).copy_(ids)


def routing(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.experts.triton.routing.route_kernel."""
    _check_routing(call)
    num_blocks = -(-call.num_tokens // call.BLOCK_TOKENS)
    require(tuple(grid) == (num_blocks,), f"the grid {grid} is not one program for each of {num_blocks} blocks")
    require_tensor("block_counts", call.block_counts, torch.int32, num_blocks, call.EXPERTS_PADDED)

    def compute() -> None:
        _route(call)
        blocks = torch.split(plain(call.ids), call.BLOCK_TOKENS)
        counts = [block.flatten().bincount(minlength=call.EXPERTS_PADDED) for block in blocks]
        plain(call.block_counts).copy_(torch.stack(counts))

    return compute


def grouping(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.experts.triton.routing.group_kernel."""
    _check_routing(call)
    all_pairs = call.ids.numel()
    require(tuple(grid) == (call.NUM_EXPERTS,), f"the grid {grid} is not one program for each expert")
    require_tensor("pairs", call.pairs, torch.int32, call.NUM_EXPERTS, call.num_tokens)
    require_tensor("num_pairs", call.num_pairs, torch.int32, call.NUM_EXPERTS)
    most = min(all_pairs, all_pairs // call.TILE_ROWS + call.NUM_EXPERTS)
    require(call.most_tiles >= most, f"{call.most_tiles} tiles, and there may be {most}")
    for name in ("tile_experts", "tile_starts"):
        require_tensor(name, getattr(call, name), torch.int32, call.most_tiles)
    if call.num_blocks:
        require_tensor("block_counts", call.block_counts, torch.int32, call.num_blocks, call.EXPERTS_PADDED)
        require(call.num_blocks == -(-call.num_tokens // call.BLOCK_TOKENS), f"{call.num_blocks} blocks")

    def compute() -> None:
        if call.num_blocks == 0:
            _route(call)
        ids = plain(call.ids).flatten()
        counts = ids.bincount(minlength=call.NUM_EXPERTS)
        if call.num_blocks:
            block_sums = plain(call.block_counts).sum(0)[: call.NUM_EXPERTS]
            require(torch.equal(block_sums, counts), "block_counts are not those of ids")
        plain(call.num_pairs).copy_(counts)
        tiles = []
        for expert, count in enumerate(counts.tolist()):
            plain(call.pairs)[expert, :count] = (ids == expert).nonzero().flatten()
            tiles += [(expert, start) for start in range(0, count, call.TILE_ROWS)]
        plain(call.tile_experts).fill_(-1)
        for name, values in zip(("tile_experts", "tile_starts"), zip(*tiles, strict=True), strict=True):
            plain(getattr(call, name))[: len(tiles)] = torch.tensor(values)

    return compute


def grouped_linear(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.experts.triton.experts.grouped_linear_kernel."""
    num_experts, _, num_inputs = call.weights.shape
    num_outputs = call.output.shape[1] * (2 if call.GATED else 1)
    require(call.weights.is_contiguous(), "weights is not contiguous")
    require_tensor("weights", call.weights, call.output.dtype, num_experts, num_outputs, num_inputs)
    return grouped_product(call, grid, num_experts, call.BLOCK_OUTPUTS, lambda expert: plain(call.weights)[expert])


def grouped_product(
    call: Any, grid: tuple[int, ...], num_experts: int, tile_outputs: int, weight_of: Callable[[int], torch.Tensor]
) -> Compute:
    """Check what products of experts have in common.

    Args:
        call: the launch.
        grid: its programs.
        num_experts: of the weights.
        tile_outputs: features that a program writes.
        weight_of: returns an expert's weights.
    """
    all_pairs, num_outputs = call.output.shape
    num_inputs = call.rows.shape[1]
    dtype, most_tiles = call.output.dtype, call.tile_experts.shape[0]
    for name in ("output", "rows", "pairs"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    require((call.num_outputs, call.num_inputs) == (num_outputs, num_inputs), "sizes do not match the operands")
    require(call.GATED or not call.IS_GELU, "a product without a gate has an activation")
    require_tensor("rows", call.rows, dtype, all_pairs // call.PAIRS_PER_ROW, num_inputs)
    require_tensor("pairs", call.pairs, torch.int32, num_experts, call.num_tokens)
    require_tensor("num_pairs", call.num_pairs, torch.int32, num_experts)
    if call.row_weights is not None:
        require(call.row_weights.is_contiguous(), "row_weights is not contiguous")
        require_tensor("row_weights", call.row_weights, torch.float32, call.num_tokens, all_pairs // call.num_tokens)
    wanted = (most_tiles, -(-num_outputs // tile_outputs))
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} tiles")

    def compute() -> None:
        rows, num_pairs = plain(call.rows), plain(call.num_pairs)
        tiles = list(zip(plain(call.tile_experts).tolist(), plain(call.tile_starts).tolist(), strict=True))
        for expert, start in tiles:
            if expert >= 0:
                require(expert < num_experts, f"a tile is of expert {expert}, and there are {num_experts}")
                end = min(int(num_pairs[expert]), start + call.BLOCK_ROWS)
                pairs = plain(call.pairs)[expert, start:end].long()
                require(bool(((pairs >= 0) & (pairs < all_pairs)).all()), f"pairs leaves the {all_pairs} pairs")
                result = F.linear(rows[pairs // call.PAIRS_PER_ROW], weight_of(expert))
                if call.row_weights is not None:
                    result *= plain(call.row_weights).flatten()[pairs, None]
                if call.GATED:
                    gate, up = result.chunk(2, dim=1)
                    result = (F.gelu(gate, approximate="tanh") if call.IS_GELU else F.silu(gate)) * up
                plain(call.output)[pairs] = result
        computed = sum(min(int(num_pairs[expert]) - start, call.BLOCK_ROWS) for expert, start in tiles if expert >= 0)
        require(computed == int(num_pairs.sum()), f"tiles of {call.BLOCK_ROWS} rows do not list each pair once")

    return compute


def combine(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.experts.triton.experts.combine_kernel."""
    num_tokens, width = call.output.shape
    require_tensor("expert_outputs", call.expert_outputs, call.output.dtype, num_tokens * call.TOP_K, width)
    require_tensor("weights", call.weights, torch.float32, num_tokens, call.TOP_K)
    for name in ("output", "expert_outputs", "weights"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    require(width == call.WIDTH, f"WIDTH {call.WIDTH} is not that of the output, {width}")
    require(tuple(grid) == (num_tokens, -(-width // call.BLOCK)), f"the grid {grid} does not cover the output")

    def compute() -> None:
        outputs = plain(call.expert_outputs).view(num_tokens, call.TOP_K, width).float()
        plain(call.output).copy_((outputs * plain(call.weights).unsqueeze(2)).sum(dim=1))

    return compute


CONTRACTS: dict[str, Contract] = {
    "route_kernel": routing,
    "group_kernel": grouping,
    "grouped_linear_kernel": grouped_linear,
    "combine_kernel": combine,
}
