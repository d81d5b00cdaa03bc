"""Causal convolutions as two Triton kernels: a sequence's first tokens and its states, and all other tokens.

The first WIDTH - 1 tokens of a sequence in a step read the state, which one program reads and writes. The tokens after
them read inputs only, so programs share them: each computes a tile of neighbouring tokens, whose inputs it reads again
for each weight, from the L1 cache. Both kernels add the same numbers in the same order.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.saves import first_save, save_token, sequence_at

__all__ = ["conv_other_tokens_kernel", "conv_sequence_kernel"]


@triton.jit
def _bias(bias, channel, mask, BLOCK: tl.constexpr):
    """Return what the sums begin with."""
    return tl.zeros([BLOCK], tl.float32) if bias is None else tl.load(bias + channel, mask=mask).to(tl.float32)


@triton.jit
def _store(output, sums, mask, HAS_SILU: tl.constexpr):
    sums = sums / (1.0 + tl.exp(-sums)) if HAS_SILU else sums
    tl.store(output, sums.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _write_state(
    state,
    to_slot,
    old_slot,
    inputs,
    input_stride,
    token,
    first,
    continues,
    channel,
    mask,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the last WIDTH - 1 inputs up to ``token`` to a slot; the old state holds those before ``first``.

    It may be in this slot: rows ascend, so one that is overwritten has been read.
    """
    if to_slot >= 0:
        for row in tl.static_range(WIDTH - 1):
            index = token - first - (WIDTH - 2) + row  # of the sequence's tokens in this step
            value = tl.zeros([BLOCK], tl.float32)
            if index >= 0:
                value = tl.load(inputs + (first + index) * input_stride + channel, mask=mask).to(tl.float32)
            elif continues:
                value = tl.load(state + (old_slot * (WIDTH - 1) + index + WIDTH - 1) * CHANNELS + channel, mask=mask)
            tl.store(state + (to_slot * (WIDTH - 1) + row) * CHANNELS + channel, value, mask=mask)


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "starts", "save_tokens", "save_slots"],
)
def conv_sequence_kernel(
    output,  # [num_tokens, CHANNELS]
    inputs,  # [num_tokens, CHANNELS]
    weight,  # [CHANNELS, WIDTH]
    bias,  # [CHANNELS], or None
    state,  # [num_slots, WIDTH - 1, CHANNELS]
    cu_seqlens,
    slots,
    starts,
    save_tokens,
    save_slots,
    num_saves,
    input_stride,  # from one token to the next
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """Compute a sequence's first WIDTH - 1 tokens and write its states; the grid is [channel blocks, sequences]."""
    sequence = tl.program_id(1)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    if slot >= 0 and first < end:
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = channel < CHANNELS
        continues = tl.load(starts + sequence) == 0
        for offset in tl.static_range(WIDTH - 1):
            if first + offset < end:
                sums = _bias(bias, channel, mask, BLOCK)
                for tap in tl.static_range(WIDTH):
                    x = tl.zeros([BLOCK], tl.float32)
                    if offset + tap >= WIDTH - 1:
                        at = first + offset + tap - (WIDTH - 1)
                        x = tl.load(inputs + at * input_stride + channel, mask=mask).to(tl.float32)
                    elif continues:
                        x = tl.load(state + (slot * (WIDTH - 1) + offset + tap) * CHANNELS + channel, mask=mask)
                    sums += x * tl.load(weight + channel * WIDTH + tap, mask=mask).to(tl.float32)
                _store(output + (first + offset) * CHANNELS + channel, sums, mask, HAS_SILU)
        save = first_save(save_tokens, num_saves, first)
        token = save_token(save_tokens, num_saves, save)
        while token < end:
            save_slot = tl.load(save_slots + save).to(tl.int64)
            _write_state(
                state,
                save_slot,
                slot,
                inputs,
                input_stride,
                token.to(tl.int64),
                first,
                continues,
                channel,
                mask,
                CHANNELS,
                WIDTH,
                BLOCK,
            )
            save += 1
            token = save_token(save_tokens, num_saves, save)
        tl.debug_barrier()  # every thread has read the state
        _write_state(
            state,
            slot,
            slot,
            inputs,
            input_stride,
            end - 1,
            first,
            continues,
            channel,
            mask,
            CHANNELS,
            WIDTH,
            BLOCK,
        )


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_decodes"], do_not_specialize_on_alignment=["cu_seqlens", "slots"]
)
def conv_other_tokens_kernel(
    output,
    inputs,
    weight,
    bias,
    cu_seqlens,
    slots,
    num_tokens,
    num_seqs,
    num_decodes,
    input_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    TAPS: tl.constexpr,  # a power of two, at least WIDTH
    HAS_SILU: tl.constexpr,
):
    """Compute TOKENS tokens except their sequences' first WIDTH - 1; the grid is [blocks of tokens, channel blocks]."""
    token = num_decodes + tl.program_id(0) * TOKENS
    stop = tl.minimum(token + TOKENS, num_tokens)
    channel, row, tap = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS), tl.arange(0, TAPS)
    mask = channel < CHANNELS
    taps = tl.load(
        weight + channel[:, None] * WIDTH + tap[None, :], mask=mask[:, None] & (tap < WIDTH)[None, :], other=0.0
    ).to(tl.float32)
    first_sums = _bias(bias, channel, mask, BLOCK)
    sequence = sequence_at(cu_seqlens, num_seqs, token)
    while (token < stop) & (sequence < num_seqs):
        first, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
        start, limit = tl.maximum(token, first + WIDTH - 1), tl.minimum(end, stop)
        if (start < limit) & (tl.load(slots + sequence) >= 0):
            tile_mask = (row < limit - start)[:, None] & mask[None, :]
            sums = tl.zeros([TOKENS, BLOCK], tl.float32) + first_sums[None, :]
            for index in tl.static_range(WIDTH):
                from_input = inputs + (start + index - (WIDTH - 1)).to(tl.int64) * input_stride
                x = tl.load(from_input + row[:, None] * input_stride + channel[None, :], mask=tile_mask, other=0.0)
                of_tap = tl.sum(tl.where(tap[None, :] == index, taps, 0.0), axis=1)
                sums += x.to(tl.float32) * of_tap[None, :]
            to = output + start.to(tl.int64) * CHANNELS
            _store(to + row[:, None] * CHANNELS + channel[None, :], sums, tile_mask, HAS_SILU)
        token = tl.maximum(token, end)
        sequence += 1
