"""Attention of decodes, whose contexts are split: Flash-Decoding (Dao et al., 2023), with splits of a sequence's own.

A sequence's context is divided by its own length alone, so what it gets never depends on the rest of the batch. The
splits of all sequences are one list, over which as many programs as fill the GPU loop: a long context among short ones
is shared by all of them, and the launch follows from shapes alone, as a CUDA graph needs it.

    seq_lens          [ 700   20   300 ]        KEYS_PER_SPLIT 256
    first_item        [ 0     3    4     6 ]    the number of splits before each sequence, and of all
    item_sequences    [ 0 0 0 1 2 2 ]           of each split

The functions are long because a launch passes every pointer, stride and constant by itself.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton.attend import METADATA, add_sink, attend_to_range, first_tile, reload_rows

__all__ = ["plan_splits_kernel", "reduce_splits_kernel", "split_decode_kernel"]


@triton.jit
def _keys_per_split(num_keys, TILE: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the keys of each split but the last of a context: a multiple of TILE, at least KEYS_PER_SPLIT."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), TILE) * TILE, KEYS_PER_SPLIT)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=METADATA)
def plan_splits_kernel(
    first_item,  # int32 [num_seqs + 1]
    item_sequences,  # int32 [num_seqs * the most splits of one]
    seq_lens,
    num_seqs,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_LANES: tl.constexpr,
):
    """One program lists the splits of all sequences. A padding sequence has one, which is empty."""
    num_before = 0
    split = tl.arange(0, MAX_SPLITS)
    for start in range(0, num_seqs, NUM_LANES):
        sequence = start + tl.arange(0, NUM_LANES)
        is_sequence = sequence < num_seqs
        seq_len = tl.load(seq_lens + sequence, mask=is_sequence, other=0)
        num_keys = seq_len - first_tile(seq_len - 1, WINDOW, CHUNK, TILE)
        num_splits = tl.maximum(tl.cdiv(num_keys, _keys_per_split(num_keys, TILE, KEYS_PER_SPLIT, MAX_SPLITS)), 1)
        num_splits = tl.where(is_sequence, num_splits, 0)
        first = num_before + tl.cumsum(num_splits, axis=0) - num_splits
        tl.store(first_item + sequence, first, mask=is_sequence)
        item = first[:, None] + split[None, :]
        is_item = split[None, :] < num_splits[:, None]
        tl.store(item_sequences + item, tl.broadcast_to(sequence[:, None], item.shape), mask=is_item)
        num_before += tl.sum(num_splits, axis=0)
    tl.store(first_item + num_seqs, num_before)


@triton.jit
def _own_heads(
    first_item,
    kv_head,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the query heads of a tile's rows, which of them exist, and which elements of the tile do; all reloaded."""
    row = reload_rows(first_item, 0, ROWS)  # nothing is before the first sequence
    is_head = row < GROUP_SIZE
    return kv_head * GROUP_SIZE + row, is_head, is_head[:, None] & (tl.arange(0, DIM_PADDED)[None, :] < HEAD_DIM)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=METADATA)
def split_decode_kernel(
    output,
    split_output,  # float32 [items, num_heads, HEAD_DIM], contiguous
    split_lse,  # float32 [items, num_heads], base 2
    first_item,
    item_sequences,
    query,
    key_cache,  # of FP8 as uint16 words of two elements, as value_cache
    value_cache,
    seq_lens,
    block_tables,
    sinks,  # float32 [num_heads], or None
    scale,
    softcap,  # or None
    value_scale,  # of a cache in FP8, or None
    num_seqs,
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    slot_stride,  # in elements or words
    kv_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,  # of latents; 0: there are keys and values
    ROPE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One program attends from the only query of a sequence to one split of its context, then to the next of the list.

    A context of one split is written to the output at once.
    """
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP_SIZE
    dim = tl.arange(0, DIM_PADDED)
    for item in range(tl.program_id(0), tl.load(first_item + num_seqs), tl.num_programs(0)):
        sequence = tl.load(item_sequences + item)
        first = tl.load(first_item + sequence)
        seq_len = tl.load(seq_lens + sequence)
        token = sequence.to(tl.int64)  # decodes come first, with one query each
        head, is_head, mask = _own_heads(first_item, kv_head, GROUP_SIZE, HEAD_DIM, DIM_PADDED, ROWS)
        query_offset = token * query_token_stride + (head * query_head_stride)[:, None] + dim[None, :]
        queries = tl.load(query + query_offset, mask=mask, other=0.0)
        rope_queries = None
        if ROPE_DIM > 0:
            rope_dim = tl.arange(0, ROPE_PADDED)
            rope_query = query + token * query_token_stride + HEAD_DIM + (head * query_head_stride)[:, None]
            rope_mask = is_head[:, None] & (rope_dim[None, :] < ROPE_DIM)
            rope_queries = tl.load(rope_query + rope_dim[None, :], mask=rope_mask, other=0.0)

        first_key = first_tile(seq_len - 1, WINDOW, CHUNK, TILE)
        num_keys = _keys_per_split(seq_len - first_key, TILE, KEYS_PER_SPLIT, MAX_SPLITS)
        first_key += (item - first) * num_keys
        attended, row_max, row_sum = attend_to_range(
            queries,
            rope_queries,
            tl.zeros([ROWS], dtype=tl.int32) + seq_len - 1,
            first_key,
            first_key,
            tl.minimum(first_key + num_keys, seq_len),
            key_cache + kv_head * kv_head_stride,
            value_cache + kv_head * kv_head_stride,
            None,
            slot_stride,
            0,
            block_tables + token * table_stride,
            scale,
            softcap,
            WINDOW,
            CHUNK,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_PADDED,
            HEAD_DIM,
            DIM_PADDED,
            ROPE_DIM,
            ROPE_PADDED,
            ROWS,
            TILE,
            False,
        )
        head, is_head, mask = _own_heads(first_item, kv_head, GROUP_SIZE, HEAD_DIM, DIM_PADDED, ROWS)
        sequence = tl.load(item_sequences + item, volatile=True)  # reloaded, like the heads
        token = sequence.to(tl.int64)
        first = tl.load(first_item + sequence, volatile=True)
        is_whole = tl.load(first_item + sequence + 1) - first == 1
        if sinks is not None:  # of several splits, reduce_splits_kernel adds it
            sink = tl.load(sinks + head, mask=is_head, other=0.0)
            row_sum = tl.where(is_whole, add_sink(row_sum, row_max, sink), row_sum)
        has_keys = row_sum > 0.0
        safe_sum = tl.where(has_keys, row_sum, 1.0)
        attended = attended / safe_sum[:, None]
        if value_scale is not None:
            attended = attended * value_scale
        if is_whole:
            output_offset = token * output_token_stride + (head * output_head_stride)[:, None] + dim[None, :]
            tl.store(output + output_offset, attended.to(output.dtype.element_ty), mask=mask)
        else:
            index = tl.cast(item, tl.int64) * num_heads + head  # [ROWS]
            tl.store(split_output + index[:, None] * HEAD_DIM + dim[None, :], attended, mask=mask)
            lse = tl.where(has_keys, row_max + tl.log2(safe_sum), float("-inf"))
            tl.store(split_lse + index, lse, mask=is_head)


@triton.jit
def reduce_splits_kernel(
    output,
    split_output,
    split_lse,
    first_item,
    sinks,  # float32 [num_heads], or None
    output_token_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # splits that are loaded at once
):
    """One program adds up the splits of one head of one sequence, each weighted by its share of the softmax's sum."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_item + sequence)
    num_splits = tl.load(first_item + sequence + 1) - first
    if num_splits > 1:
        split = tl.arange(0, MAX_SPLITS)
        dim = tl.arange(0, DIM_PADDED)
        is_dim = dim < HEAD_DIM
        lse_of = split_lse + first.to(tl.int64) * tl.num_programs(1) + head
        lse = tl.load(lse_of + split * tl.num_programs(1), mask=split < num_splits, other=float("-inf"))
        largest = tl.max(lse, axis=0)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.exp2(lse - shift), axis=0)
        if sinks is not None:
            total = add_sink(total, largest, tl.load(sinks + head))
        combined = tl.zeros([DIM_PADDED], dtype=tl.float32)
        for start in range(0, num_splits, CHUNK):
            some = start + tl.arange(0, CHUNK)
            is_split = some < num_splits
            weights = tl.exp2(tl.load(lse_of + some * tl.num_programs(1), mask=is_split, other=float("-inf")) - shift)
            index = (first + some).to(tl.int64) * tl.num_programs(1) + head
            split_offset = index[:, None] * HEAD_DIM + dim[None, :]
            attended = tl.load(split_output + split_offset, mask=is_split[:, None] & is_dim[None, :], other=0.0)
            combined += tl.sum(attended * weights[:, None], axis=0)
        combined = combined / tl.where(total == 0.0, 1.0, total)
        offset = sequence.to(tl.int64) * output_token_stride + head * output_head_stride + dim
        tl.store(output + offset, combined.to(output.dtype.element_ty), mask=is_dim)
