"""The gated delta rule as a Triton kernel: one program for a sequence, a head and some columns of its state.

The program keeps its part of the state in registers from the sequence's first token of the step to its last. A column's
arithmetic does not depend on the others, and all programs have the same shape, so a token's bits depend neither on the
batch nor on the tokens that are computed with it.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.saves import first_save, save_token

__all__ = ["delta_rule_kernel"]


@triton.jit
def _normalized(vector, eps):
    return vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + eps)


@triton.jit
def _load_token(token, end, tensors, strides, masks):
    """Load what a head has of a token: query, key, value, decay and beta; after the last token, that one again."""
    at = tl.minimum(token, end - 1).to(tl.int64)
    return (
        tl.load(tensors[0] + at * strides[0], mask=masks[0], other=0.0),
        tl.load(tensors[1] + at * strides[1], mask=masks[0], other=0.0),
        tl.load(tensors[2] + at * strides[2], mask=masks[1], other=0.0),
        tl.load(tensors[3] + at * strides[3], mask=masks[2], other=None if masks[2] is None else 0.0),
        tl.load(tensors[4] + at * strides[4]),
    )


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves", "max_length"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "starts", "save_tokens", "save_slots"],
)
def delta_rule_kernel(
    output,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    query,  # [num_tokens, NUM_HEADS / HEADS_PER_KEY, KEY_DIM], a token's heads are contiguous
    key,
    value,  # [num_tokens, NUM_HEADS, VALUE_DIM], likewise
    decay,  # [num_tokens, NUM_HEADS], or [num_tokens, NUM_HEADS, KEY_DIM]
    beta,  # [num_tokens, NUM_HEADS]
    state,  # [num_slots, NUM_HEADS, KEY_DIM, VALUE_DIM]
    cu_seqlens,
    slots,
    starts,
    save_tokens,
    save_slots,
    num_saves,
    max_length,  # of a sequence that is computed here, in tokens of the step
    query_stride,  # from one token to the next
    key_stride,
    value_stride,
    eps,
    query_scale,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,  # a power of two, at least KEY_DIM
    BLOCK_VALUE: tl.constexpr,  # columns of a program
    DECAYS_ROWS: tl.constexpr,  # whether each row of a head's state has a decay of its own
):
    """Compute a sequence's tokens with some columns of one head; the grid is [column blocks, heads, sequences]."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    if (slot >= 0) & (first < end) & (end - first <= max_length):
        row = tl.arange(0, BLOCK_KEY)
        column = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
        row_mask, column_mask = row < KEY_DIM, column < VALUE_DIM
        mask = row_mask[:, None] & column_mask[None, :]
        element = (head * KEY_DIM + row[:, None]) * VALUE_DIM + column[None, :]
        slot_size = NUM_HEADS * KEY_DIM * VALUE_DIM
        past = tl.zeros([BLOCK_KEY, BLOCK_VALUE], tl.float32)
        if tl.load(starts + sequence) == 0:
            past = tl.load(state + slot * slot_size + element, mask=mask, other=0.0)
        save = first_save(save_tokens, num_saves, first)
        next_save = save_token(save_tokens, num_saves, save)
        key_at, value_at = head // HEADS_PER_KEY * KEY_DIM + row, head * VALUE_DIM + column
        decay_at = head * KEY_DIM + row if DECAYS_ROWS else head
        tensors = (query + key_at, key + key_at, value + value_at, decay + decay_at, beta + head)
        decay_stride = NUM_HEADS * KEY_DIM if DECAYS_ROWS else NUM_HEADS
        strides = (query_stride, key_stride, value_stride, decay_stride, NUM_HEADS)
        masks = (row_mask, column_mask, row_mask if DECAYS_ROWS else None)
        # Two tokens are loaded while one is computed: a load takes longer than that.
        q, k, v, kept, strength = _load_token(first, end, tensors, strides, masks)
        next_q, next_k, next_v, next_kept, next_strength = _load_token(first + 1, end, tensors, strides, masks)
        for token in range(first, end):
            later = _load_token(token + 2, end, tensors, strides, masks)
            q, k = _normalized(q.to(tl.float32), eps) * query_scale, _normalized(k.to(tl.float32), eps)
            past = past * (tl.exp(kept)[:, None] if DECAYS_ROWS else tl.exp(kept))
            recalled = tl.sum(k[:, None] * past, axis=0)
            change = (v.to(tl.float32) - recalled) * strength
            past = past + k[:, None] * change[None, :]
            read = tl.sum(q[:, None] * past, axis=0)
            to = output + tl.cast(token, tl.int64) * (NUM_HEADS * VALUE_DIM) + value_at
            tl.store(to, read.to(output.dtype.element_ty), mask=column_mask)
            if token == next_save:
                save_slot = tl.load(save_slots + save).to(tl.int64)
                if save_slot >= 0:
                    tl.store(state + save_slot * slot_size + element, past, mask=mask)
                save += 1
                next_save = save_token(save_tokens, num_saves, save)
            q, k, v, kept, strength = next_q, next_k, next_v, next_kept, next_strength
            next_q, next_k, next_v, next_kept, next_strength = later
        tl.store(state + slot * slot_size + element, past, mask=mask)
