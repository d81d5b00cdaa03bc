"""The Triton kernel of latent attention in ops.py: it completes a token's queries, and stores its latent.

It computes in float32 and rounds what it stores. One program computes a token, so what a token gets does not depend on
the others.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotate_and_store_latents_kernel"]


@triton.jit
def _rotate_rows(
    output,
    rows,
    output_stride,
    row_stride,
    cos,  # [1, HALF_PADDED]
    sin,
    NUM_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Rotate element i of each row with element i + HALF."""
    row, element = tl.arange(0, ROWS_PADDED)[:, None], tl.arange(0, HALF_PADDED)[None, :]
    mask = (row < NUM_ROWS) & (element < HALF)
    first = tl.load(rows + row * row_stride + element, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows + row * row_stride + element + HALF, mask=mask, other=0.0).to(tl.float32)
    to = output + row * output_stride + element
    tl.store(to, (first * cos - second * sin).to(output.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (second * cos + first * sin).to(output.dtype.element_ty), mask=mask)


# The arrays of a step may be slices of one buffer, with another alignment in another step.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotate_and_store_latents_kernel(
    query,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM], contiguous
    cache,  # [num_slots, RANK + ROPE_DIM], contiguous
    rotated,  # [num_tokens, NUM_HEADS, ROPE_DIM]
    latent,  # [num_tokens, RANK + ROPE_DIM]
    weight,  # [RANK]
    table,  # float32 [length, 2, ROPE_DIM // 2]; None: nothing is rotated
    positions,  # int64 [num_tokens], or None
    slot_mapping,  # int64 [num_tokens]
    rotated_token_stride,
    rotated_head_stride,
    latent_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # powers of two
    RANK_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Compute one token."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROPE_DIM // 2
    width: tl.constexpr = RANK + ROPE_DIM
    element = tl.arange(0, HALF_PADDED)[None, :]
    cos, sin = tl.full([1, HALF_PADDED], 1.0, tl.float32), tl.zeros([1, HALF_PADDED], tl.float32)
    if table is not None:
        angles = table + tl.load(positions + token) * ROPE_DIM + element
        cos = tl.load(angles, mask=element < half, other=0.0)
        sin = tl.load(angles + half, mask=element < half, other=0.0)
    _rotate_rows(
        query + token * (NUM_HEADS * width) + RANK,
        rotated + token * rotated_token_stride,
        width,
        rotated_head_stride,
        cos,
        sin,
        NUM_HEADS,
        half,
        HEADS_PADDED,
        HALF_PADDED,
    )
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        source, to = latent + token * latent_stride, cache + slot * width
        _rotate_rows(to + RANK, source + RANK, 0, 0, cos, sin, 1, half, 1, HALF_PADDED)
        dim = tl.arange(0, RANK_PADDED)
        mask = dim < RANK
        x = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
        factors = tl.load(weight + dim, mask=mask, other=0.0).to(tl.float32)
        tl.store(to + dim, (x * factor * factors).to(cache.dtype.element_ty), mask=mask)
