"""The Triton kernels of ops.py, which says what they compute: each reads and writes an operation's rows once.

All compute in float32 and round what they store. A row is reduced by one program, in the same order for any number of
rows. So what a token gets does not depend on the others.
"""

# ruff: noqa: N803, N806 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache.triton.fp8 import encode_fp8

_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _factors(weight, column, mask, ADDS_ONE: tl.constexpr):
    """Return what a norm multiplies by, as float32."""
    factors = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    return factors + 1.0 if ADDS_ONE else factors


@triton.jit
def _inverse_rms(x, eps, WIDTH: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of each row of a tile; its padding is 0."""
    return tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / WIDTH + eps)


# --- residual and norms ----------------------------------------------------------------------------------------------


# The number of tokens changes from step to step, and a step must not wait for a compilation.
@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    total,  # [num_rows, WIDTH]; not written without an addend
    normed,  # [num_rows, WIDTH]; not written without a norm
    residual,
    addend,  # or None
    addend_weight,  # [WIDTH], or None: the addend is not normalized
    weight,  # [WIDTH], or None
    sum_scale,  # [1], factor of the sum, or None
    num_rows,
    residual_stride,
    addend_stride,
    scale,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    ADDS_ONE: tl.constexpr,
):
    """Compute every num_programs-th row, so that a program loads the weights once for all its rows."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < WIDTH
    if addend_weight is not None:
        addend_factors = _factors(addend_weight, column, mask, ADDS_ONE)
    if weight is not None:
        factors = _factors(weight, column, mask, ADDS_ONE)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        index = tl.cast(row, tl.int64)
        x = tl.load(residual + index * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        if addend is not None:
            added = tl.load(addend + index * addend_stride + column, mask=mask, other=0.0).to(tl.float32)
            if addend_weight is not None:
                added = added * _inverse_rms(added, eps, WIDTH) * addend_factors
            x += scale * added
            if sum_scale is not None:
                x *= tl.load(sum_scale).to(tl.float32)
            rounded = x.to(total.dtype.element_ty)
            tl.store(total + index * WIDTH + column, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if weight is not None:
            x = x * _inverse_rms(x, eps, WIDTH) * factors
            tl.store(normed + index * WIDTH + column, x.to(normed.dtype.element_ty), mask=mask)


# --- queries and keys ------------------------------------------------------------------------------------------------


@triton.jit
def _rotate_heads(
    output,
    heads,
    weight,
    cos,
    sin,
    eps,
    inverse_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORMS_EACH_HEAD: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    IS_UNWEIGHTED: tl.constexpr = False,
):
    """Normalize and rotate a token's contiguous heads, as two tiles of their first and second halves.

    ``cos`` and ``sin`` are [1, HALF_PADDED], or None. Without weights heads are normalized only if IS_UNWEIGHTED. With
    an ``inverse_scale`` the output is FP8: the codes of what it would be otherwise, times that factor.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, HEADS_PADDED)[:, None]
    element = tl.arange(0, HALF_PADDED)[None, :]
    mask = (head < NUM_HEADS) & (element < HALF)
    offset = head * HEAD_DIM + element
    first = tl.load(heads + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        sums = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if NORMS_EACH_HEAD:
            factor = tl.rsqrt(sums / HEAD_DIM + eps)
            at, is_weight = element, element < HALF
        else:
            factor = tl.rsqrt(tl.sum(sums, axis=0, keep_dims=True) / (NUM_HEADS * HEAD_DIM) + eps)
            at, is_weight = offset, mask
        first = first * factor * _factors(weight, at, is_weight, ADDS_ONE)
        second = second * factor * _factors(weight, at + HALF, is_weight, ADDS_ONE)
    if IS_UNWEIGHTED:
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1, keep_dims=True) / HEAD_DIM + eps)
        first = first * factor
        second = second * factor
    if cos is not None:
        first, second = first * cos - second * sin, second * cos + first * sin
    first = first.to(heads.dtype.element_ty)
    second = second.to(heads.dtype.element_ty)
    if inverse_scale is not None:
        first = encode_fp8(first, inverse_scale)
        second = encode_fp8(second, inverse_scale)
    tl.store(output + offset, first, mask=mask)
    tl.store(output + offset + HALF, second, mask=mask)


# The arrays of a step may be slices of one buffer, with another alignment in another step.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotate_and_store_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_cache,
    value_cache,
    inverse_key_scale,  # of caches of FP8, which are uint8; else None
    inverse_value_scale,
    qkv,
    query_weight,  # [HEAD_DIM] or [NUM_HEADS * HEAD_DIM], or None
    key_weight,  # likewise
    table,  # float32 [length, 2, HEAD_DIM // 2], or None: no RoPE
    positions,  # int64 [num_tokens]
    slot_mapping,  # int64 [num_tokens], or None: there are only queries
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # powers of two
    KV_HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORMS_EACH_HEAD: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
):
    """Compute one token."""
    token = tl.program_id(0).to(tl.int64)
    keys = qkv + token * qkv_stride + NUM_HEADS * HEAD_DIM
    cos = None
    sin = None
    if table is not None:
        element = tl.arange(0, HALF_PADDED)[None, :]
        angles = table + tl.load(positions + token) * HEAD_DIM + element
        cos = tl.load(angles, mask=element < HEAD_DIM // 2, other=0.0)
        sin = tl.load(angles + HEAD_DIM // 2, mask=element < HEAD_DIM // 2, other=0.0)
    _rotate_heads(
        query + token * (NUM_HEADS * HEAD_DIM),
        qkv + token * qkv_stride,
        query_weight,
        cos,
        sin,
        eps,
        None,
        NUM_HEADS,
        HEAD_DIM,
        HEADS_PADDED,
        HALF_PADDED,
        NORMS_EACH_HEAD,
        ADDS_ONE,
    )
    if slot_mapping is not None:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            start = slot * (NUM_KV_HEADS * HEAD_DIM)
            _rotate_heads(
                key_cache + start,
                keys,
                key_weight,
                cos,
                sin,
                eps,
                inverse_key_scale,
                NUM_KV_HEADS,
                HEAD_DIM,
                KV_HEADS_PADDED,
                HALF_PADDED,
                NORMS_EACH_HEAD,
                ADDS_ONE,
            )
            values = keys + NUM_KV_HEADS * HEAD_DIM
            if NORMS_VALUES:
                _rotate_heads(
                    value_cache + start,
                    values,
                    None,
                    None,
                    None,
                    eps,
                    inverse_value_scale,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    KV_HEADS_PADDED,
                    HALF_PADDED,
                    NORMS_EACH_HEAD,
                    ADDS_ONE,
                    IS_UNWEIGHTED=True,
                )
            else:
                at = tl.arange(0, 2 * KV_HEADS_PADDED * HALF_PADDED)  # of the slot, whose heads are contiguous
                mask = at < NUM_KV_HEADS * HEAD_DIM
                stored = tl.load(values + at, mask=mask)
                if inverse_value_scale is not None:
                    stored = encode_fp8(stored, inverse_value_scale)
                tl.store(value_cache + start + at, stored, mask=mask)


# --- feed-forward ----------------------------------------------------------------------------------------------------


@triton.jit
def gated_activation_kernel(
    output,  # [num_tokens, WIDTH]
    gate_up,
    gate_up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Compute BLOCK elements of a row; both activations are x times a sigmoid: tanh(z) is 2 sigmoid(2z) - 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    argument = _SQRT_8_OVER_PI * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    small = tl.exp(-tl.abs(argument))  # at most 1
    activated = gate * (tl.where(argument >= 0.0, 1.0, small) / (1.0 + small)) * up
    tl.store(output + row * WIDTH + column, activated.to(output.dtype.element_ty), mask=mask)
