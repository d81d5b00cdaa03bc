"""The choice of indexer.py for few queries of long contexts: many programs choose the keys of one query.

Each has a chunk of the scores, as numbers of four digits of a byte. For one digit after the other, from the highest,
they count how often their keys have each value of it; the next launch adds the counts of all chunks and finds the
digit of the last key that is chosen. Then each counts its chosen keys, and writes their slots after those of the
chunks before it. So six launches take the place of one program that reads all scores five times.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["MIN_KEY", "choose_in_chunks", "count_chosen_kernel", "count_digits_kernel", "keys_of", "list_chosen_kernel"]

MIN_KEY = tl.constexpr(-(2**31))
_DIGITS = tl.constexpr(256)
_LEVELS = 4
_CHUNK = 2048  # scores of a program
_CHUNKS_AT_ONCE = tl.constexpr(16)  # whose counts are added at the same time


@triton.jit
def keys_of(scores, index, end):
    """Return scores as integers of the same order, and which of them may be chosen."""
    score = tl.load(scores + index, mask=index < end, other=float("-inf"))
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # of -0.0 and 0.0 the same
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), score > float("-inf")


@triton.jit
def _narrowed(counts, states, top_k, level, num_chunks):
    """Return the first ``level`` digits of the smallest chosen key, and how many of the keys with these are chosen.

    Args:
        counts: those of the last of these digits, int32 [num_chunks, _DIGITS].
        states: what this returned for one digit less, int64 [2].
    """
    digit = tl.arange(0, _DIGITS)
    prefix, room = tl.cast(0, tl.int64), tl.cast(top_k, tl.int64)
    if level > 1:
        prefix, room = tl.load(states), tl.load(states + 1)
    total = tl.zeros([_DIGITS], dtype=tl.int32)
    for first in range(0, num_chunks, _CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, _CHUNKS_AT_ONCE)
        at = counts + chunk[:, None] * _DIGITS + digit[None, :]
        total += tl.sum(tl.load(at, mask=(chunk < num_chunks)[:, None], other=0), axis=0)
    at_least = tl.sum(total, axis=0) - tl.cumsum(total, axis=0) + total  # with this digit or a higher one
    chosen = tl.sum((at_least >= room).to(tl.int32), axis=0) - 1
    above = tl.sum(tl.where(digit == chosen, at_least - total, 0), axis=0)
    return prefix * 256 + chosen, room - above


@triton.jit(do_not_specialize=["num_keys", "top_k", "level"], do_not_specialize_on_alignment=["positions"])
def count_digits_kernel(
    counts,  # int32 [num_tokens, LEVELS, num_chunks, 256]
    states,  # int64 [num_tokens, LEVELS + 1, 2]
    scores,  # float32 [num_tokens, num_keys]
    positions,  # int64 [num_tokens]; -1: padding
    num_keys,
    top_k,
    level,  # the digit: 0 is the highest
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the values of a digit in a chunk's keys that have the same higher digits as the smallest chosen key."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(positions + token).to(tl.int32) + 1
    if (end > top_k) & (chunk * CHUNK < end):
        own_states = states + token * ((LEVELS + 1) * 2)
        own_counts = counts + (token * LEVELS + level) * tl.num_programs(1) * _DIGITS
        prefix = tl.cast(0, tl.int64)
        if level > 0:
            before = own_counts - tl.num_programs(1) * _DIGITS
            prefix, room = _narrowed(before, own_states + 2 * (level - 1), top_k, level, tl.cdiv(end, CHUNK))
            if chunk == 0:
                tl.store(own_states + 2 * level, prefix)
                tl.store(own_states + 2 * level + 1, room)
        key, may_be_chosen = keys_of(scores + token * num_keys, chunk * CHUNK + tl.arange(0, CHUNK), end)
        number = key.to(tl.int64) - MIN_KEY  # from 0
        shift = 8 * (LEVELS - 1 - level)
        is_open = may_be_chosen & ((number >> (shift + 8)) == prefix)
        own = tl.histogram(((number >> shift) & 255).to(tl.int32), _DIGITS, mask=is_open)
        tl.store(own_counts + chunk * _DIGITS + tl.arange(0, _DIGITS), own)


@triton.jit(do_not_specialize=["num_keys", "top_k"], do_not_specialize_on_alignment=["positions"])
def count_chosen_kernel(
    chosen,  # int32 [num_tokens, num_chunks, 2]: keys that are chosen, and those that equal the smallest chosen one
    counts,  # of count_digits_kernel, as the next three
    states,
    scores,
    positions,
    num_keys,
    top_k,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count a chunk's keys that are higher than the smallest chosen one, and those that equal it."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(positions + token).to(tl.int32) + 1
    if chunk * CHUNK < end:
        own_states = states + token * ((LEVELS + 1) * 2)
        smallest, room = tl.cast(0, tl.int64), tl.cast(0, tl.int64)  # all keys are higher
        if end > top_k:
            before = counts + (token * LEVELS + LEVELS - 1) * tl.num_programs(1) * _DIGITS
            smallest, room = _narrowed(before, own_states + 2 * (LEVELS - 1), top_k, LEVELS, tl.cdiv(end, CHUNK))
        if chunk == 0:
            tl.store(own_states + 2 * LEVELS, smallest)
            tl.store(own_states + 2 * LEVELS + 1, room)
        key, may_be_chosen = keys_of(scores + token * num_keys, chunk * CHUNK + tl.arange(0, CHUNK), end)
        number = key.to(tl.int64) - MIN_KEY
        own = chosen + (token * tl.num_programs(1) + chunk) * 2
        tl.store(own, tl.sum((may_be_chosen & (number > smallest)).to(tl.int32), axis=0))
        tl.store(own + 1, tl.sum((may_be_chosen & (number == smallest)).to(tl.int32), axis=0))


@triton.jit(
    do_not_specialize=["num_keys", "top_k", "table_stride"],
    do_not_specialize_on_alignment=["slots", "positions", "sequences", "block_tables"],
)
def list_chosen_kernel(
    slots,  # int32 [num_tokens, top_k]
    chosen,  # of count_chosen_kernel, as the next three
    states,
    scores,
    positions,
    sequences,  # int64 [num_tokens]
    block_tables,
    num_keys,
    top_k,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the slots of a chunk's chosen keys, by position, and its part of the -1 after those of all chunks."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(positions + token).to(tl.int32) + 1
    own_slots, own_chosen = slots + token * top_k, chosen + token * tl.num_programs(1) * 2
    higher_before, tied_before, higher, tied = 0, 0, 0, 0
    for first in range(0, tl.cdiv(end, CHUNK), _DIGITS):
        index = first + tl.arange(0, _DIGITS)
        of_higher = tl.load(own_chosen + 2 * index, mask=index * CHUNK < end, other=0)
        of_tied = tl.load(own_chosen + 2 * index + 1, mask=index * CHUNK < end, other=0)
        higher_before += tl.sum(tl.where(index < chunk, of_higher, 0), axis=0)
        tied_before += tl.sum(tl.where(index < chunk, of_tied, 0), axis=0)
        higher += tl.sum(of_higher, axis=0)
        tied += tl.sum(of_tied, axis=0)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    smallest, room = tl.cast(0, tl.int64), tl.cast(0, tl.int32)
    if end > 0:
        smallest = tl.load(states + token * ((LEVELS + 1) * 2) + 2 * LEVELS)
        room = tl.load(states + token * ((LEVELS + 1) * 2) + 2 * LEVELS + 1).to(tl.int32)
    if chunk * CHUNK < end:
        key, may_be_chosen = keys_of(scores + token * num_keys, position, end)
        number = key.to(tl.int64) - MIN_KEY
        is_tied = may_be_chosen & (number == smallest)
        rank = tied_before + tl.cumsum(is_tied.to(tl.int32), axis=0)
        is_chosen = (may_be_chosen & (number > smallest)) | (is_tied & (rank <= room))
        to = higher_before + tl.minimum(tied_before, room) + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        block_tables += tl.load(sequences + token) * table_stride
        block = tl.load(block_tables + position // BLOCK_SIZE, mask=is_chosen, other=0)
        tl.store(own_slots + to, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_chosen)
    is_empty = (position >= higher + tl.minimum(tied, room)) & (position < top_k)
    tl.store(own_slots + position, tl.full([CHUNK], -1, dtype=tl.int32), mask=is_empty)


def choose_in_chunks(
    slots: torch.Tensor,
    scores: torch.Tensor,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """Set ``slots``, int32 [num_tokens, top_k], to what each query chooses, and -1 after that."""
    (num_tokens, num_keys), top_k = scores.shape, slots.shape[1]
    num_chunks = triton.cdiv(num_keys, _CHUNK)
    counts = torch.empty(num_tokens, _LEVELS, num_chunks, 256, dtype=torch.int32, device=slots.device)
    states = torch.empty(num_tokens, _LEVELS + 1, 2, dtype=torch.int64, device=slots.device)
    chosen = torch.empty(num_tokens, num_chunks, 2, dtype=torch.int32, device=slots.device)
    grid, constants = (num_tokens, num_chunks), {"LEVELS": _LEVELS, "CHUNK": _CHUNK, "num_warps": 8}
    constants["enable_fp_fusion"] = False
    for level in range(_LEVELS):
        count_digits_kernel[grid](counts, states, scores, positions, num_keys, top_k, level, **constants)
    count_chosen_kernel[grid](chosen, counts, states, scores, positions, num_keys, top_k, **constants)
    table_stride = block_tables.stride(0)
    list_chosen_kernel[grid](
        *(slots, chosen, states, scores, positions, sequences, block_tables),
        *(num_keys, top_k, table_stride),
        BLOCK_SIZE=block_size,
        **constants,
    )
