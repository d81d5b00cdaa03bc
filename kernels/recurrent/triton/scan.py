"""Mamba 2's recurrence as a Triton kernel: one program for a sequence, a head and some rows of its state.

The program keeps its part of the state in registers from the sequence's first token of the step to its last. A row's
arithmetic does not depend on the others, and all programs have the same shape, so a token's bits depend neither on the
batch nor on the tokens that are computed with it.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.saves import first_save, save_token

__all__ = ["scan_kernel"]


@triton.jit
def _load_token(token, end, tensors, strides, masks):
    """Load what a head has of a token: input, key, query and step; after the last token, that one again."""
    at = tl.minimum(token, end - 1).to(tl.int64)
    return (
        tl.load(tensors[0] + at * strides[0], mask=masks[0], other=0.0),
        tl.load(tensors[1] + at * strides[1], mask=masks[1], other=0.0),
        tl.load(tensors[2] + at * strides[2], mask=masks[1], other=0.0),
        tl.load(tensors[3] + at * strides[3]),
    )


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves", "max_length"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "starts", "save_tokens", "save_slots"],
)
def scan_kernel(
    output,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    inputs,  # [num_tokens, NUM_HEADS, HEAD_DIM], a token's heads are contiguous
    steps,  # [num_tokens, NUM_HEADS]
    decay,  # [NUM_HEADS]
    keys,  # [num_tokens, NUM_HEADS / HEADS_PER_GROUP, STATE_SIZE], a token's groups are contiguous
    queries,
    skip,  # [NUM_HEADS]
    state,  # [num_slots, NUM_HEADS, HEAD_DIM, STATE_SIZE]
    cu_seqlens,
    slots,
    starts,
    save_tokens,
    save_slots,
    num_saves,
    max_length,  # of a sequence that is computed here, in tokens of the step
    input_stride,  # from one token to the next
    key_stride,
    query_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # rows of a program
    BLOCK_STATE: tl.constexpr,  # a power of two, at least STATE_SIZE
):
    """Compute a sequence's tokens with some rows of one head; the grid is [row blocks, heads, sequences]."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    if (slot >= 0) & (first < end) & (end - first <= max_length):
        row = tl.program_id(0) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
        column = tl.arange(0, BLOCK_STATE)
        row_mask, column_mask = row < HEAD_DIM, column < STATE_SIZE
        mask = row_mask[:, None] & column_mask[None, :]
        element = (head * HEAD_DIM + row[:, None]) * STATE_SIZE + column[None, :]
        slot_size = NUM_HEADS * HEAD_DIM * STATE_SIZE
        past = tl.zeros([BLOCK_DIM, BLOCK_STATE], tl.float32)
        if tl.load(starts + sequence) == 0:
            past = tl.load(state + slot * slot_size + element, mask=mask, other=0.0)
        rate, direct = tl.load(decay + head), tl.load(skip + head)
        save = first_save(save_tokens, num_saves, first)
        next_save = save_token(save_tokens, num_saves, save)
        input_at, group_at = head * HEAD_DIM + row, head // HEADS_PER_GROUP * STATE_SIZE + column
        tensors = (inputs + input_at, keys + group_at, queries + group_at, steps + head)
        strides = (input_stride, key_stride, query_stride, NUM_HEADS)
        masks = (row_mask, column_mask)
        # Two tokens are loaded while one is computed: a load takes longer than that.
        x, k, q, step = _load_token(first, end, tensors, strides, masks)
        next_x, next_k, next_q, next_step = _load_token(first + 1, end, tensors, strides, masks)
        for token in range(first, end):
            later = _load_token(token + 2, end, tensors, strides, masks)
            x, k, q = x.to(tl.float32), k.to(tl.float32), q.to(tl.float32)
            past = past * tl.exp(step * rate) + (step * x)[:, None] * k[None, :]
            read = tl.sum(past * q[None, :], axis=1) + direct * x
            to = output + tl.cast(token, tl.int64) * (NUM_HEADS * HEAD_DIM) + input_at
            tl.store(to, read.to(output.dtype.element_ty), mask=row_mask)
            if token == next_save:
                save_slot = tl.load(save_slots + save).to(tl.int64)
                if save_slot >= 0:
                    tl.store(state + save_slot * slot_size + element, past, mask=mask)
                save += 1
                next_save = save_token(save_tokens, num_saves, save)
            x, k, q, step = next_x, next_k, next_q, next_step
            next_x, next_k, next_q, next_step = later
        tl.store(state + slot * slot_size + element, past, mask=mask)
