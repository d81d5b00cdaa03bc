"""What the kernels of this folder share: where in a step a token's sequence and its saves are.

A kernel goes through the tokens of a sequence, and through the saves beside them:

    save = first_save(save_tokens, num_saves, first)
    for token in range(first, end):
        ...
        if save_token(save_tokens, num_saves, save) == token:
            ...
            save += 1
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["first_save", "save_token", "sequence_at"]

_NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def first_save(save_tokens, num_saves, first):
    """Return the index of the first save after the token ``first`` or a later one; by bisection."""
    low, high = tl.cast(0, tl.int32), tl.cast(num_saves, tl.int32)
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(save_tokens + middle) < first
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def save_token(save_tokens, num_saves, save):
    """Return the token of a save, or a number that no token has after the last one."""
    return tl.load(save_tokens + save, mask=save < num_saves, other=_NEVER)


@triton.jit
def sequence_at(cu_seqlens, num_seqs, token):
    """Return the last sequence that begins at ``token`` or before it; by bisection."""
    low, high = tl.cast(0, tl.int32), tl.cast(num_seqs, tl.int32)
    while low + 1 < high:
        middle = (low + high) // 2
        begins_later = tl.load(cu_seqlens + middle) > token
        low = tl.where(begins_later, low, middle)
        high = tl.where(begins_later, middle, high)
    return low
