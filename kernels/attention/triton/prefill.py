"""Attention of sequences that compute several tokens: chunks of prompts, and drafts with the token before them.

prefill_kernel is long because a launch passes every pointer, stride and compile-time constant by itself: Triton has no
structures. A third of it is its argument list, a fifth the call of attend_to_range.
"""

# ruff: noqa: N803, N806 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton.attend import METADATA, add_sink, attend_to_range, first_tile, reload_rows

__all__ = ["prefill_kernel"]


@triton.jit
def _sequence_of_tile(tile, cu_seqlens_q, num_seqs, QUERIES_PER_TILE: tl.constexpr):
    """Find the last sequence whose tiles begin at or before `tile`, by bisection.

    Sequence i is given the tiles from cu_seqlens_q[i] // QUERIES_PER_TILE + i on: enough for its queries whatever
    their number, so the grid follows from the number of tokens and sequences alone (as in vLLM's Triton attention).
    `cu_seqlens_q` begins with a sequence of the launch, whose first query need not be the batch's first.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // QUERIES_PER_TILE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["first_token", "num_seqs", "table_stride"], do_not_specialize_on_alignment=METADATA)
def prefill_kernel(
    output,
    query,
    key_cache,  # of FP8 as uint16 words of two elements, as value_cache
    value_cache,
    rope_cache,  # of the rest of keys that all heads share; None: there is none, or it follows the value of a latent
    cu_seqlens_q,
    seq_lens,
    block_tables,
    sinks,  # float32 [num_heads], or None
    scale,
    softcap,  # or None
    value_scale,  # of a cache in FP8, or None
    first_token,  # index of the first sequence's first query: cu_seqlens_q[0]
    num_seqs,
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    slot_stride,  # in elements or words
    kv_head_stride,
    rope_stride,  # elements from a slot of rope_cache to the next one
    table_stride,
    GROUP_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CHUNK: tl.constexpr,  # 0: none
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,  # elements of a key that are apart from the others; 0: there are none
    ROPE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
):
    """One program computes a tile of one sequence's queries for all query heads of one KV head.

    Long for its arguments: see the module.
    """
    QUERIES_PER_TILE: tl.constexpr = ROWS // GROUP_SIZE
    tile = first_token // QUERIES_PER_TILE + tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(tile, cu_seqlens_q, num_seqs, QUERIES_PER_TILE)
    first_row = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - first_row
    seq_len = tl.load(seq_lens + sequence)
    first_query = (tile - (first_row // QUERIES_PER_TILE + sequence)) * QUERIES_PER_TILE
    if first_query < query_len:
        row = tl.arange(0, ROWS)
        query_index = first_query + row // GROUP_SIZE
        # Of the tile's first row, in 64 bits; what another row adds fits in 32, which takes fewer registers.
        token = (first_row + first_query).to(tl.int64)
        first_head = kv_head * GROUP_SIZE
        dim = tl.arange(0, DIM_PADDED)
        mask = ((row < QUERIES_PER_TILE * GROUP_SIZE) & (query_index < query_len))[:, None] & (dim[None, :] < HEAD_DIM)
        own_query = query + token * query_token_stride + first_head * query_head_stride
        row_offset = row // GROUP_SIZE * query_token_stride + row % GROUP_SIZE * query_head_stride
        queries = tl.load(own_query + row_offset[:, None] + dim[None, :], mask=mask, other=0.0)
        rope_queries = None
        if ROPE_DIM > 0:
            rope_dim = tl.arange(0, ROPE_PADDED)
            is_row = (row < QUERIES_PER_TILE * GROUP_SIZE) & (query_index < query_len)
            rope_mask = is_row[:, None] & (rope_dim[None, :] < ROPE_DIM)
            rope_query = own_query + HEAD_DIM + row_offset[:, None] + rope_dim[None, :]
            rope_queries = tl.load(rope_query, mask=rope_mask, other=0.0)

        context_len = seq_len - query_len  # before this step
        first_key = first_tile(context_len + first_query, WINDOW, CHUNK, TILE)
        end_key = tl.minimum(context_len + first_query + QUERIES_PER_TILE, seq_len)
        attended, row_max, row_sum = attend_to_range(
            queries,
            rope_queries,
            context_len + query_index,
            first_key,
            tl.minimum(context_len + first_query + 1, end_key),
            end_key,
            key_cache + kv_head * kv_head_stride,
            value_cache + kv_head * kv_head_stride,
            rope_cache,
            slot_stride,
            rope_stride,
            block_tables + sequence.to(tl.int64) * table_stride,
            scale,
            softcap,
            WINDOW,
            CHUNK,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_PADDED,
            VALUE_DIM,
            VALUE_PADDED,
            ROPE_DIM,
            ROPE_PADDED,
            ROWS,
            TILE,
            TWO_LOOPS,
        )
        row = reload_rows(cu_seqlens_q + sequence, first_row, ROWS)
        query_index = first_query + row // GROUP_SIZE
        # Reloaded too: kept throughout the loop, it makes ptxas spill in some variants for sm_100.
        query_len = tl.load(cu_seqlens_q + sequence + 1, volatile=True) - first_row
        dim = tl.arange(0, VALUE_PADDED)
        mask = ((row < QUERIES_PER_TILE * GROUP_SIZE) & (query_index < query_len))[:, None] & (dim[None, :] < VALUE_DIM)
        if sinks is not None:
            row_sum = add_sink(row_sum, row_max, tl.load(sinks + first_head + row % GROUP_SIZE))
        attended = attended / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # a padding sequence has no keys
        if value_scale is not None:
            attended = attended * value_scale
        own_output = output + token * output_token_stride + first_head * output_head_stride
        row_offset = row // GROUP_SIZE * output_token_stride + row % GROUP_SIZE * output_head_stride
        pointers = own_output + row_offset[:, None] + dim[None, :]
        tl.store(pointers, attended.to(output.dtype.element_ty), mask=mask)
