"""The Triton kernels of ops.py, which says what they compute.

A token's rank among others is an integer: its noisy logit in the order of floats, above the complement of its id. So a
maximum in any order finds the smallest id of equal ones.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton.math import is_finite_key, noisy_logits, ordered

__all__ = ["best_of_parts_kernel", "best_of_tokens_kernel"]


@triton.jit
def row_of(indices):
    """Return which row of the logits this program reads: an index of the batch."""
    row = tl.program_id(0).to(tl.int64)
    return row if indices is None else tl.load(indices + row)


@triton.jit
def priority(logits, tokens):
    """Return int64 numbers in the order in which tokens are preferred: by logit, then the smaller id; a NaN first."""
    key = ordered(tl.where(logits == 0.0, 0.0, logits))  # 0 and -0 are equal
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - tokens)


@triton.jit
def store_token(tokens, row, best):
    """Store the token of a row's highest priority, or -1 if its logit is not finite."""
    is_valid = is_finite_key((best >> 32).to(tl.int32))
    tl.store(tokens + row, tl.where(is_valid, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1))


@triton.jit
def best_of_tokens_kernel(
    parts,  # int64 [num_rows, num_programs(1)]
    logits,
    indices,  # int64 [num_rows], or None: all rows
    temperatures,  # float32 [num_rows], or None: no noise
    keys,  # int32 [num_rows, 2], or None
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
):
    """Find the highest priority among BLOCK tokens of a row, with noise if asked to."""
    program = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row_of(indices) * stride + token, mask=token < vocab_size, other=-float("inf"))
    if temperatures is not None:
        first = tl.load(keys + 2 * program).to(tl.uint32, bitcast=True)
        second = tl.load(keys + 2 * program + 1).to(tl.uint32, bitcast=True)
        x = noisy_logits(x, tl.load(temperatures + program), token, first, second)
    tl.store(parts + program * tl.num_programs(1) + tl.program_id(1), tl.max(priority(x, token), axis=0))


@triton.jit
def best_of_parts_kernel(
    tokens,  # int64 [batch_size]; only those of the indices are written
    parts,  # int64 [num_rows, num_parts]
    indices,
    num_parts,
    PARTS_PADDED: tl.constexpr,  # a power of two, at least num_parts
):
    """Choose a row's token from the highest priorities of its parts."""
    part = tl.arange(0, PARTS_PADDED)
    best = tl.load(parts + tl.program_id(0) * num_parts + part, mask=part < num_parts, other=-(2**63))
    store_token(tokens, row_of(indices), tl.max(best, axis=0))
