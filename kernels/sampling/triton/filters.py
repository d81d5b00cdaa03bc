"""The Triton kernels that change logits before a token is chosen: ops.py says what they compute.

They load and store only the logits that change, and nothing that they are compiled for depends on the batch.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton.kernels import row_of

__all__ = ["bitmask_kernel", "change_tokens_kernel", "penalise_kernel"]


@triton.jit(do_not_specialize=["num_pairs", "width", "stride"])
def change_tokens_kernel(
    logits,
    indices,  # int64 [num_pairs]: rows of the logits
    token_ids,  # int64 [num_pairs]
    biases,  # float32 [num_pairs], or None: -inf
    missing,  # int64 [num_pairs], or None: only where it is above 0 a logit changes
    words,  # int64 [num_pairs, width], or None: only where all tokens match a logit changes; -1 matches any
    owners,  # int64 [num_pairs]: rows of the tails
    tails,  # int64 [num_owners, width]
    num_pairs,
    width,
    stride,
    BLOCK: tl.constexpr,
):
    """Add to the logits of listed tokens. Several words may forbid the same token: -inf added twice is -inf once."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_changed = pair < num_pairs
    at = logits + tl.load(indices + pair, mask=is_changed, other=0) * stride
    at += tl.load(token_ids + pair, mask=is_changed, other=0)
    if missing is not None:
        is_changed &= tl.load(missing + pair, mask=is_changed, other=0) > 0
    if words is not None:
        tail = tails + tl.load(owners + pair, mask=is_changed, other=0) * width
        word = words + pair.to(tl.int64) * width
        for i in range(width):
            wanted = tl.load(word + i, mask=is_changed, other=-1)
            is_changed &= (wanted == -1) | (wanted == tl.load(tail + i, mask=is_changed, other=-1))
    x = tl.load(at, mask=is_changed, other=0.0)
    if biases is None:
        x += -float("inf")
    else:
        x += tl.load(biases + pair, mask=is_changed, other=0.0)
    tl.store(at, x, mask=is_changed)


@triton.jit(do_not_specialize=["stride"])
def penalise_kernel(
    logits,
    indices,  # int64 [num_rows]
    history,  # uint8 or int32 [num_rows, vocab_size]: whether, or how often, a sequence has a token
    repetition,  # float32 [num_rows], or None: frequency and presence
    frequency,  # float32 [num_rows], or None: repetition
    presence,
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
):
    """Penalise those of BLOCK tokens that a sequence has."""
    program = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(history + program * vocab_size + token, mask=token < vocab_size, other=0)
    is_in = count > 0
    at = logits + row_of(indices) * stride + token
    x = tl.load(at, mask=is_in, other=0.0)
    if repetition is not None:
        penalty = tl.load(repetition + program)
        x = tl.where(x > 0.0, tl.div_rn(x, penalty), x * penalty)
    else:
        x -= tl.load(frequency + program) * count.to(tl.float32)
        x -= tl.load(presence + program)
    tl.store(at, x, mask=is_in)


@triton.jit(do_not_specialize=["stride"])
def bitmask_kernel(
    logits,
    indices,  # int64 [num_rows], or None: all rows
    bitmask,  # int32 [num_rows, num_words]: bit i % 32 of word i // 32 allows token i
    vocab_size,
    num_words,
    stride,
    WORDS: tl.constexpr,
):
    """Forbid those of 32 * WORDS tokens of a row that the bitmask does not allow."""
    program = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask + program * num_words + word, mask=word < num_words, other=-1)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    is_forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
    at = logits + row_of(indices) * stride + token
    tl.store(at, -float("inf"), mask=is_forbidden & (token < vocab_size))
