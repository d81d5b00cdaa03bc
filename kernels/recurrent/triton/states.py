"""The kernel that carries states through prompts, chunk after chunk, for each kind of recurrence.

A chunk that begins with the state S [keys, values] has, for each of its tokens, a query, a key and a value. What needs
no state is in memory: T and P [chunk, chunk], which other kernels compute for all chunks at the same time.

    changes C = T (V - (scaled K) S), or V where there is no T
    output    = (scaled Q) S + P C
    S         = kept S + (scaled K)^T C

One program has some columns of a head's state, which need no others, and goes through all chunks of a sequence. The
chain of its products is what a prompt takes at least; loads of the next chunk run beside them.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.chunks import chunk_index, load_rows, product, rounded, segment_end
from kernels.recurrent.triton.saves import first_save, save_token

__all__ = ["carry_states_kernel"]


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves", "num_decodes", "max_short"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "starts", "save_tokens", "save_slots"],
)
def carry_states_kernel(
    output,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    query,  # [num_tokens, NUM_HEADS / HEADS_PER_KEY, KEY_DIM], a token's heads are contiguous
    key,
    reading_key,  # None: it is the key that writes the state too, or no key reads it
    value,  # [num_tokens, NUM_HEADS, VALUE_DIM], likewise
    solutions,  # T, [num_tokens, NUM_HEADS, CHUNK], or None
    scores,  # P, [num_tokens, NUM_HEADS, CHUNK]
    scales,  # [num_tokens, NUM_HEADS, 2 or 3]: of queries, writing keys, reading keys; None: they are scaled already
    kept,  # [num_chunks, NUM_HEADS], or without scales [num_chunks, NUM_HEADS, KEY_DIM], of each row of a state
    state,  # [num_slots, NUM_HEADS, KEY_DIM, VALUE_DIM]; TRANSPOSED: [num_slots, NUM_HEADS, VALUE_DIM, KEY_DIM]
    cu_seqlens,
    slots,
    starts,
    save_tokens,
    save_slots,
    num_saves,
    num_decodes,
    max_short,  # tokens of a sequence that is not computed in chunks
    query_stride,  # from one token to the next
    key_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,  # a power of two, at least KEY_DIM
    BLOCK_VALUE: tl.constexpr,  # columns of a program
    CHUNK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,  # of the products' operands
    PRECISION: tl.constexpr,
):
    """Carry some columns of one head's state through a sequence; the grid is [column blocks, heads, sequences]."""
    head, sequence = tl.program_id(1), num_decodes + tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    if (slot >= 0) & (end - first > max_short):
        NUM_SCALES: tl.constexpr = 2 if solutions is None else 3  # noqa: N806 - a compile-time constant
        KEPT: tl.constexpr = KEY_DIM if scales is None else 1  # noqa: N806
        token, row = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
        column = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
        row_mask, column_mask = row < KEY_DIM, column < VALUE_DIM
        mask = row_mask[:, None] & column_mask[None, :]
        element = (head * KEY_DIM + row[:, None]) * VALUE_DIM + column[None, :]
        if TRANSPOSED:
            element = (head * VALUE_DIM + column[None, :]) * KEY_DIM + row[:, None]
        slot_size = NUM_HEADS * KEY_DIM * VALUE_DIM
        past = tl.zeros([BLOCK_KEY, BLOCK_VALUE], tl.float32)
        if tl.load(starts + sequence) == 0:
            past = tl.load(state + slot * slot_size + element, mask=mask, other=0.0)
        key_at, value_at = head // HEADS_PER_KEY * KEY_DIM + row[None, :], head * VALUE_DIM + column[None, :]
        square_at = (token[:, None] * NUM_HEADS + head) * CHUNK + token[None, :]
        scale_at = (token * NUM_HEADS + head) * NUM_SCALES
        none = tl.zeros([CHUNK, BLOCK_VALUE], tl.float32)
        save = first_save(save_tokens, num_saves, first)
        segment = first
        while segment < end:
            stop = segment_end(save_tokens, num_saves, save, end)
            kept_at = (chunk_index(segment, sequence, save, CHUNK) * NUM_HEADS + head) * KEPT
            if scales is None:
                factor = tl.load(kept + kept_at + row, mask=row_mask, other=0.0)
            else:
                factor = tl.load(kept + kept_at)
            for start in range(segment, stop, CHUNK):
                is_token = token < stop - start
                key_mask, value_mask = is_token[:, None] & row_mask[None, :], is_token[:, None] & column_mask[None, :]
                # Loaded one chunk ahead, as the compiler does with what is multiplied; after the last, it is not used.
                kept_at += NUM_HEADS * KEPT
                if scales is None:
                    next_factor = tl.load(kept + kept_at + row, mask=row_mask, other=0.0)
                else:
                    next_factor = tl.load(kept + kept_at)
                change = load_rows(value, start, value_stride, token[:, None] * value_stride + value_at, value_mask)
                k = load_rows(key, start, key_stride, token[:, None] * key_stride + key_at, key_mask)
                q = load_rows(query, start, query_stride, token[:, None] * query_stride + key_at, key_mask)
                p = load_rows(scores, start, NUM_HEADS * CHUNK, square_at, is_token[:, None])
                before = rounded(past, DTYPE)
                if scales is not None:
                    read_scale = load_rows(scales, start, NUM_HEADS * NUM_SCALES, scale_at, is_token)
                    write_scale = load_rows(scales, start, NUM_HEADS * NUM_SCALES, scale_at + 1, is_token)
                if solutions is not None:
                    t = load_rows(solutions, start, NUM_HEADS * CHUNK, square_at, is_token[:, None])
                    reader = k
                    if reading_key is not None:
                        reader = load_rows(
                            reading_key, start, key_stride, token[:, None] * key_stride + key_at, key_mask
                        )
                    recalled = product(reader, before, none, DTYPE, PRECISION)
                    if scales is not None:
                        recalled *= load_rows(scales, start, NUM_HEADS * NUM_SCALES, scale_at + 2, is_token)[:, None]
                    change = product(t, change - recalled, none, DTYPE, PRECISION)
                read = product(q, before, none, DTYPE, PRECISION)
                if scales is None:
                    past = product(tl.trans(k), change, past * factor[:, None], DTYPE, PRECISION)
                else:
                    past = product(tl.trans(k), change * write_scale[:, None], past * factor, DTYPE, PRECISION)
                    read *= read_scale[:, None]
                read = product(p, change, read, DTYPE, PRECISION)
                factor = next_factor
                to = output + tl.cast(start, tl.int64) * (NUM_HEADS * VALUE_DIM)
                at = token[:, None] * (NUM_HEADS * VALUE_DIM) + value_at
                tl.store(to + at, read.to(output.dtype.element_ty), mask=value_mask)
            if save_token(save_tokens, num_saves, save) < end:
                save_slot = tl.load(save_slots + save).to(tl.int64)
                if save_slot >= 0:
                    tl.store(state + save_slot * slot_size + element, past, mask=mask)
                save += 1
            segment = stop
        tl.store(state + slot * slot_size + element, past, mask=mask)
