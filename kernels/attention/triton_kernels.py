"""Triton kernels for paged attention: one for mixed batches, and a pair that splits long decodes over the context.

All of them walk over keys in tiles of TILE positions and find each position's slot through the block table, so a tile
may span several pages, or a page several tiles. The softmax is FlashAttention-2's online one (Dao, 2023), in base 2.
Query heads that share a KV head are packed into the rows of one tile, so that a key is loaded once for all of them:

    row of a tile     0    1    2    3    4    5   ...       (GROUP_SIZE 2)
    query, head       0,0  0,1  1,0  1,1  2,0  2,1 ...

Nothing a masked lane points at is read: a block of -1, a slot after the context, a padded head dimension.
This module knows pointers and strides; triton_backend.py chooses the kernel and its grid.

mixed_kernel and split_decode_kernel are long because a launch passes every pointer, stride and compile-time constant by
itself: Triton has no structures. A third of each is its argument list, a fifth the call of _attend_to_range.
"""

# ruff: noqa: N803, N806 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_to_range(
    query,  # [ROWS, DIM_PADDED]
    query_position,  # [ROWS]
    first_key,
    end_key,
    key_head,  # pointers to this KV head of slot 0
    value_head,
    slot_stride,
    block_table,  # pointer to this sequence's row
    scale,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to the keys at positions [first_key, end_key); return the unnormalised sum, row maxima and row sums."""
    dim = tl.arange(0, DIM_PADDED)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    output = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    for start in range(first_key, end_key, TILE):
        position = start + tl.arange(0, TILE)
        block = tl.load(block_table + position // BLOCK_SIZE, mask=position < end_key, other=-1)
        is_key = block >= 0
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = slot[:, None] * slot_stride + dim[None, :]
        mask = is_key[:, None] & (dim[None, :] < HEAD_DIM)
        keys = tl.load(key_head + offset, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * _LOG2_E)
        distance = query_position[:, None] - position[None, :]
        visible = is_key[None, :] & (distance >= 0)
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
        weights = tl.exp2(scores - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        values = tl.load(value_head + offset, mask=mask, other=0.0)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        output = output * rescale[:, None]
        output += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        row_max = new_max
    return output, row_max, row_sum


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


# What changes from step to step is not specialised on: a step must not wait for a compilation. A step's arrays may be
# slices of one buffer, so their alignment changes too; the other tensors and strides are the same in every step.
_METADATA = ["cu_seqlens_q", "seq_lens", "block_tables"]


@triton.jit(do_not_specialize=["first_token", "num_seqs", "table_stride"], do_not_specialize_on_alignment=_METADATA)
def mixed_kernel(
    output,
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_tables,
    scale,
    first_token,  # index of the first sequence's first query: cu_seqlens_q[0]
    num_seqs,
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
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
        head = kv_head * GROUP_SIZE + row % GROUP_SIZE
        token = (first_row + query_index).to(tl.int64)
        dim = tl.arange(0, DIM_PADDED)
        mask = ((row < QUERIES_PER_TILE * GROUP_SIZE) & (query_index < query_len))[:, None] & (dim[None, :] < HEAD_DIM)
        query_offset = (token * query_token_stride + head * query_head_stride)[:, None] + dim[None, :]
        queries = tl.load(query + query_offset, mask=mask, other=0.0)

        context_len = seq_len - query_len  # before this step
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(context_len + first_query - WINDOW + 1, 0)
        end_key = tl.minimum(context_len + first_query + QUERIES_PER_TILE, seq_len)
        attended, _, row_sum = _attend_to_range(
            queries,
            context_len + query_index,
            first_key,
            end_key,
            key_cache + kv_head * kv_head_stride,
            value_cache + kv_head * kv_head_stride,
            slot_stride,
            block_tables + sequence.to(tl.int64) * table_stride,
            scale,
            WINDOW,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_PADDED,
            ROWS,
            TILE,
        )
        attended = attended / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # a padding sequence has no keys
        output_offset = (token * output_token_stride + head * output_head_stride)[:, None] + dim[None, :]
        tl.store(output + output_offset, attended.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_METADATA)
def split_decode_kernel(
    split_output,  # float32 [num_seqs, num_heads, num_splits, HEAD_DIM], contiguous
    split_lse,  # float32 [num_seqs, num_heads, num_splits], base 2
    query,
    key_cache,
    value_cache,
    cu_seqlens_q,
    seq_lens,
    block_tables,
    scale,
    query_token_stride,
    query_head_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One program attends from one sequence's only query to one split of its context.

    This is Flash-Decoding (Dao et al., 2023), whose results for each split reduce_splits_kernel adds up. The context is
    divided by its own length, not the longest one's, so every split of a long sequence has work.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(cu_seqlens_q + sequence)
    if tl.load(cu_seqlens_q + sequence + 1) > token:
        seq_len = tl.load(seq_lens + sequence)
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM_PADDED)
        head = kv_head * GROUP_SIZE + row
        mask = (row < GROUP_SIZE)[:, None] & (dim[None, :] < HEAD_DIM)
        query_offset = token.to(tl.int64) * query_token_stride + (head * query_head_stride)[:, None] + dim[None, :]
        queries = tl.load(query + query_offset, mask=mask, other=0.0)

        window_start = 0
        if WINDOW > 0:
            window_start = tl.maximum(seq_len - WINDOW, 0)
        keys_per_split = tl.cdiv(tl.cdiv(seq_len - window_start, NUM_SPLITS), TILE) * TILE
        first_key = window_start + split * keys_per_split
        end_key = tl.minimum(first_key + keys_per_split, seq_len)
        attended, row_max, row_sum = _attend_to_range(
            queries,
            tl.zeros([ROWS], dtype=tl.int32) + seq_len - 1,
            first_key,
            end_key,
            key_cache + kv_head * kv_head_stride,
            value_cache + kv_head * kv_head_stride,
            slot_stride,
            block_tables + sequence.to(tl.int64) * table_stride,
            scale,
            WINDOW,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_PADDED,
            ROWS,
            TILE,
        )
        has_keys = row_sum > 0.0
        safe_sum = tl.where(has_keys, row_sum, 1.0)
        num_heads = tl.num_programs(1) * GROUP_SIZE
        index = (sequence.to(tl.int64) * num_heads + head) * NUM_SPLITS + split  # [ROWS]
        tl.store(split_output + index[:, None] * HEAD_DIM + dim[None, :], attended / safe_sum[:, None], mask=mask)
        lse = tl.where(has_keys, row_max + tl.log2(safe_sum), float("-inf"))
        tl.store(split_lse + index, lse, mask=row < GROUP_SIZE)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens_q"])
def reduce_splits_kernel(
    output,
    split_output,
    split_lse,
    cu_seqlens_q,
    output_token_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # a power of two
):
    """One program adds up the splits of one head of one sequence, each weighted by its share of the softmax's sum."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_q + sequence)
    if tl.load(cu_seqlens_q + sequence + 1) > token:
        split = tl.arange(0, NUM_SPLITS)
        dim = tl.arange(0, DIM_PADDED)
        is_dim = dim < HEAD_DIM
        index = (sequence.to(tl.int64) * tl.num_programs(1) + head) * NUM_SPLITS + split
        lse = tl.load(split_lse + index)
        split_offset = index[:, None] * HEAD_DIM + dim[None, :]
        attended = tl.load(split_output + split_offset, mask=is_dim[None, :], other=0.0)
        largest = tl.max(lse, axis=0)
        weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
        total = tl.sum(weights, axis=0)
        combined = tl.sum(attended * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
        offset = token.to(tl.int64) * output_token_stride + head * output_head_stride + dim
        tl.store(output + offset, combined.to(output.dtype.element_ty), mask=is_dim)
