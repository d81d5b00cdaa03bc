"""Routing in Triton: each token's most probable experts, and the tokens of each expert divided into tiles.

The contract is `experts.route`. Nothing waits for the device, and the shapes follow from the
number of tokens alone, so a CUDA graph can hold it. All numbers are compared and added in an order that one token's
logits fix, so what a token gets does not depend on the others.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["TILE_ROWS", "Routes", "route_triton"]

TILE_ROWS = 64  # of plain weights, one size for all batches: see grouped_linear_kernel
_TILE_ELEMENTS = 2048  # logits that a program compares at once
_MOST_TOKENS = 64  # for which every program routes all tokens itself, rather than waiting for another launch
_LISTED_TOKENS = 256  # whose experts a program looks through at once


@dataclass(frozen=True)
class Routes:
    """The chosen experts, and the pairs of a token and one of its experts in tiles of one expert each.

    Pair p is choice p % top_k of token p // top_k.

    Attributes:
        weights: float32 [num_tokens, top_k], the most probable expert first.
        ids: int32 [num_tokens, top_k].
        pairs: int32 [num_experts, num_tokens]; the first ``num_pairs[e]`` of row e are the pairs of expert e, in order.
        num_pairs: int32 [num_experts].
        tile_experts: int32, of as many tiles as there can be; -1: there are fewer.
        tile_starts: int32, where a tile begins in its expert's row of ``pairs``; it has at most ``tile_rows`` pairs.
    """

    weights: torch.Tensor
    ids: torch.Tensor
    pairs: torch.Tensor
    num_pairs: torch.Tensor
    tile_experts: torch.Tensor
    tile_starts: torch.Tensor
    tile_rows: int

    @classmethod
    def empty(cls, num_tokens: int, num_experts: int, top_k: int, tile_rows: int, device: torch.device) -> Routes:
        """Return the memory of the routes of ``num_tokens``."""

        def integers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        all_pairs = num_tokens * top_k
        most_tiles = min(all_pairs, all_pairs // tile_rows + num_experts)
        return cls(
            torch.empty(num_tokens, top_k, dtype=torch.float32, device=device),
            integers(num_tokens, top_k),
            integers(num_experts, num_tokens),
            integers(num_experts),
            integers(most_tiles),
            integers(most_tiles),
            tile_rows,
        )


# --- choosing --------------------------------------------------------------------------------------------------------


@triton.jit
def _choose(
    weights,
    ids,
    logits,
    logits_stride,
    first_token,
    num_tokens,
    num_stored,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Choose the experts of BLOCK_TOKENS tokens, and store those of the batch's first ``num_stored`` ones.

    Returns:
        [BLOCK_TOKENS, EXPERTS_PADDED]: 0 where an expert is not chosen, and n + 1 where it is the token's n-th.
    """
    token = first_token + tl.arange(0, BLOCK_TOKENS).to(tl.int64)[:, None]
    is_token = token < num_tokens
    expert = tl.arange(0, EXPERTS_PADDED)[None, :]
    is_expert = expert < NUM_EXPERTS
    x = tl.load(logits + token * logits_stride + expert, mask=is_token & is_expert, other=0.0).to(tl.float32)
    x = tl.where(is_expert, tl.where(x == 0.0, 0.0, x), float("-inf"))  # -0.0 is not smaller than 0.0
    relative = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    # An integer that orders experts as their logits do, and equal ones by their index. No two experts have the same,
    # so the chosen ones exist and differ whatever the logits are, even if they are NaN.
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * EXPERTS_PADDED + (EXPERTS_PADDED - 1 - expert)
    none = -0x7FFFFFFFFFFFFFFF
    key = tl.where(is_expert, key, none)
    choice = tl.arange(0, TOP_K_PADDED)[None, :]
    chosen = tl.zeros((BLOCK_TOKENS, EXPERTS_PADDED), dtype=tl.int32)
    its_weights = tl.zeros((BLOCK_TOKENS, TOP_K_PADDED), dtype=tl.float32)
    its_ids = tl.zeros((BLOCK_TOKENS, TOP_K_PADDED), dtype=tl.int32)
    total = tl.zeros((BLOCK_TOKENS, 1), dtype=tl.float32)
    for n in range(TOP_K):
        best = key == tl.max(key, axis=1, keep_dims=True)
        weight = tl.sum(tl.where(best, relative, 0.0), axis=1, keep_dims=True)  # of one expert
        its_weights = tl.where(choice == n, weight, its_weights)
        its_ids = tl.where(choice == n, tl.sum(tl.where(best, expert, 0), axis=1, keep_dims=True), its_ids)
        total += weight
        chosen = tl.where(best & is_token, n + 1, chosen)
        key = tl.where(best, none, key)
    if not NORMALIZES:
        total = tl.sum(relative, axis=1, keep_dims=True)
    is_choice = (token < num_stored) & (choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, its_weights / total, mask=is_choice)
    tl.store(ids + token * TOP_K + choice, its_ids, mask=is_choice)
    return chosen


# The number of tokens changes from step to step, and a step must not wait for a compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    weights,  # float32 [num_tokens, TOP_K]
    ids,  # int32 [num_tokens, TOP_K]
    block_counts,  # int32 [num_blocks, EXPERTS_PADDED], how many tokens of a block chose an expert
    logits,  # [num_tokens, NUM_EXPERTS]
    logits_stride,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,  # powers of two
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Choose the experts of a block of tokens."""
    block = tl.program_id(0)
    chosen = _choose(
        weights,
        ids,
        logits,
        logits_stride,
        block * BLOCK_TOKENS,
        num_tokens,
        num_tokens,
        NUM_EXPERTS,
        EXPERTS_PADDED,
        TOP_K,
        TOP_K_PADDED,
        NORMALIZES,
        BLOCK_TOKENS,
    )
    counts = tl.sum((chosen > 0).to(tl.int32), axis=0)
    tl.store(block_counts + block * EXPERTS_PADDED + tl.arange(0, EXPERTS_PADDED), counts)


# --- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def _list_pairs(pairs, first_token, chosen, start, TOP_K: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Append the pairs of tokens that chose the expert; ``chosen`` is n + 1 for a choice n. Return how many it has."""
    is_chosen = (chosen > 0).to(tl.int32)
    pair = (first_token + tl.arange(0, BLOCK_TOKENS)) * TOP_K + chosen - 1
    tl.store(pairs + start + tl.cumsum(is_chosen, axis=0) - 1, pair, mask=is_chosen > 0)
    return start + tl.sum(is_chosen, axis=0)


@triton.jit
def _write_tiles(
    tile_experts,
    tile_starts,
    counts,
    expert,
    most_tiles,
    EXPERTS_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write the tiles of one expert; expert 0 also writes the unused ones. ``counts`` are all experts' pairs."""
    at = tl.arange(0, EXPERTS_PADDED)
    tiles = (counts + (TILE_ROWS - 1)) // TILE_ROWS
    first = tl.sum(tl.where(at < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(at == expert, tiles, 0), axis=0)
    for start in range(0, own, EXPERTS_PADDED):
        tile = start + at
        tl.store(tile_experts + first + tile, expert, mask=tile < own)
        tl.store(tile_starts + first + tile, tile * TILE_ROWS, mask=tile < own)
    if expert == 0:
        for start in range(tl.sum(tiles, axis=0), most_tiles, EXPERTS_PADDED):
            tl.store(tile_experts + start + at, -1, mask=start + at < most_tiles)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "most_tiles"])
def group_kernel(
    weights,
    ids,
    pairs,  # int32 [NUM_EXPERTS, num_tokens]
    num_pairs,  # int32 [NUM_EXPERTS]
    tile_experts,  # int32 [most_tiles]
    tile_starts,  # int32 [most_tiles]
    block_counts,  # of route_kernel
    logits,
    logits_stride,
    num_tokens,
    num_blocks,  # that route_kernel has routed; 0: it was not launched, and this kernel routes
    most_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    LISTED_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """List one expert's pairs, and divide them into tiles.

    Few tokens are routed here, by every program itself: that is faster than another launch. Whether they are is not a
    compile-time constant, so that the largest step compiles what a small one needs.
    """
    expert = tl.program_id(0)
    own_pairs = pairs + tl.cast(expert, tl.int64) * num_tokens
    all_experts = tl.arange(0, EXPERTS_PADDED)
    counts = tl.zeros((EXPERTS_PADDED,), dtype=tl.int32)
    listed = 0
    if num_blocks == 0:
        for first_token in range(0, num_tokens, BLOCK_TOKENS):
            chosen = _choose(
                weights,
                ids,
                logits,
                logits_stride,
                first_token,
                num_tokens,
                tl.where(expert == 0, num_tokens, 0),
                NUM_EXPERTS,
                EXPERTS_PADDED,
                TOP_K,
                TOP_K_PADDED,
                NORMALIZES,
                BLOCK_TOKENS,
            )
            counts += tl.sum((chosen > 0).to(tl.int32), axis=0)
            own = tl.sum(tl.where(all_experts[None, :] == expert, chosen, 0), axis=1)
            listed = _list_pairs(own_pairs, first_token, own, listed, TOP_K, BLOCK_TOKENS)
    else:
        for block in range(num_blocks):
            counts += tl.load(block_counts + block * EXPERTS_PADDED + all_experts)
        for first_token in range(0, num_tokens, LISTED_TOKENS):
            token = first_token + tl.arange(0, LISTED_TOKENS)[:, None]
            choice = tl.arange(0, TOP_K_PADDED)[None, :]
            is_choice = (token < num_tokens) & (choice < TOP_K)
            is_own = tl.load(ids + token * TOP_K + choice, mask=is_choice, other=-1) == expert
            own = tl.sum(tl.where(is_own, choice + 1, 0), axis=1)
            listed = _list_pairs(own_pairs, first_token, own, listed, TOP_K, LISTED_TOKENS)
    tl.store(num_pairs + expert, listed)
    _write_tiles(tile_experts, tile_starts, counts, expert, most_tiles, EXPERTS_PADDED, TILE_ROWS)


def route_triton(logits: torch.Tensor, top_k: int, *, normalize: bool, tile_rows: int = TILE_ROWS) -> Routes:
    """Route at least one token as `kernels.experts.route.route` does; ``logits`` is [num_tokens, num_experts]."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    experts_padded = triton.next_power_of_2(num_experts)
    block_tokens = max(1, min(16, _TILE_ELEMENTS // experts_padded))
    routes = Routes.empty(num_tokens, num_experts, top_k, tile_rows, logits.device)
    num_blocks = triton.cdiv(num_tokens, block_tokens) if num_tokens > _MOST_TOKENS else 0
    block_counts = routes.num_pairs.new_empty(max(num_blocks, 1), experts_padded)
    constants = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS_PADDED": experts_padded,
        "TOP_K": top_k,
        "TOP_K_PADDED": triton.next_power_of_2(top_k),
        "NORMALIZES": normalize,
        "BLOCK_TOKENS": block_tokens,
        "enable_fp_fusion": True,
    }
    if num_blocks:
        route_kernel[(num_blocks,)](
            routes.weights, routes.ids, block_counts, logits, logits.stride(0), num_tokens, **constants
        )
    group_kernel[(num_experts,)](
        routes.weights,
        routes.ids,
        routes.pairs,
        routes.num_pairs,
        routes.tile_experts,
        routes.tile_starts,
        block_counts,
        logits,
        logits.stride(0),
        num_tokens,
        num_blocks,
        len(routes.tile_experts),
        LISTED_TOKENS=_LISTED_TOKENS,
        TILE_ROWS=tile_rows,
        **constants,
    )
    return routes
