"""As chunked_delta_rule.py, as a Triton kernel for decays that differ between the rows of a state.

That is the delta rule of Kimi Linear (2025), whose chunks are derived in its report. Here g_i is a vector, and the
products of two tokens' keys are sums over the elements d of e^(g_id - g_jd) k_id k_jd. As a matrix product that needs a
factor of i and one of j, and e^-g_j overflows. So a chunk's tokens are in blocks of 16. Between tokens of two blocks
there is the beginning of the later one, with the sum r: both e^(g_i - r) and e^(r - g_j) are at most 1. Within a block
the sums are added up one by one.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.chunks import (
    bounded,
    find_chunk,
    inverse,
    load_rows,
    on_diagonal,
    product,
    reciprocal_norms,
    rounded,
)

__all__ = ["row_decays_chunks_kernel"]

_BLOCK = tl.constexpr(16)


@triton.jit
def _within_blocks(
    query_rows, key_rows, decay_rows, strides, length, row_mask, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    """Return the products of keys, and of queries with keys, of each token with those up to it in its block.

    Args:
        query_rows, key_rows, decay_rows: pointers to those of the chunk's first token, [1, 1, ROWS].
        strides: of each from one token to the next.
        length: tokens of the chunk.
        row_mask: [1, 1, ROWS].
    """
    BLOCKS: tl.constexpr = CHUNK // _BLOCK  # noqa: N806 - a compile-time constant
    first, index = tl.arange(0, BLOCKS)[:, None, None] * _BLOCK, tl.arange(0, _BLOCK)
    token = first + index[None, :, None]
    mask = (token < length) & row_mask
    queries = tl.load(query_rows + token * strides[0], mask=mask, other=0.0).to(tl.float32)
    keys = tl.load(key_rows + token * strides[1], mask=mask, other=0.0).to(tl.float32)
    distance = tl.zeros([BLOCKS, _BLOCK, ROWS], tl.float32)  # the decays after an earlier token, up to each
    of_keys = tl.zeros([BLOCKS, _BLOCK, _BLOCK], tl.float32)
    of_queries = tl.zeros([BLOCKS, _BLOCK, _BLOCK], tl.float32)
    for step in range(_BLOCK):
        earlier = _BLOCK - 1 - step
        row = first + earlier
        earlier_mask = (row < length) & row_mask
        factors = tl.exp(distance) * tl.load(key_rows + row * strides[1], mask=earlier_mask, other=0.0).to(tl.float32)
        is_column = index[None, None, :] == earlier
        of_keys += tl.where(is_column, tl.sum(keys * factors, axis=2)[:, :, None], 0.0)
        of_queries += tl.where(is_column, tl.sum(queries * factors, axis=2)[:, :, None], 0.0)
        decay = bounded(tl.load(decay_rows + row * strides[2], mask=earlier_mask, other=0.0))
        distance += tl.where(index[None, :, None] >= earlier, decay, 0.0)
    same = on_diagonal(CHUNK)
    of_keys = tl.reshape(tl.where(same, of_keys[:, :, None, :], 0.0), [CHUNK, CHUNK])
    return of_keys, tl.reshape(tl.where(same, of_queries[:, :, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
def _add_between_blocks(
    of_keys, of_queries, k, q, sums, CHUNK: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the products of each block's tokens with those of earlier blocks."""
    token = tl.arange(0, CHUNK)
    block = (token // _BLOCK)[:, None]
    for later in range(1, CHUNK // _BLOCK):
        begin = tl.sum(tl.where((token == later * _BLOCK - 1)[:, None], sums, 0.0), axis=0)[None, :]
        distance = tl.where(block == later, sums - begin, begin - sums)
        factors = tl.exp(tl.minimum(distance, 0.0))
        earlier = tl.trans(rounded(tl.where(block < later, k * factors, 0.0), DTYPE))
        of_keys = product(tl.where(block == later, k * factors, 0.0), earlier, of_keys, DTYPE, PRECISION)
        of_queries = product(tl.where(block == later, q * factors, 0.0), earlier, of_queries, DTYPE, PRECISION)
    return of_keys, of_queries


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves", "num_seqs", "num_decodes", "max_short"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "save_tokens"],
)
def row_decays_chunks_kernel(
    solutions,  # T, [num_tokens, NUM_HEADS, CHUNK]
    scores,  # P, [num_tokens, NUM_HEADS, CHUNK]
    read_queries,  # scaled, [num_tokens, NUM_HEADS, KEY_DIM]
    written_keys,  # likewise
    read_keys,
    kept,  # of each row of the state, [num_chunks, NUM_HEADS, KEY_DIM]
    query,  # [num_tokens, NUM_HEADS / HEADS_PER_KEY, KEY_DIM], a token's heads are contiguous
    key,
    decay,  # [num_tokens, NUM_HEADS, KEY_DIM]
    beta,  # [num_tokens, NUM_HEADS]
    cu_seqlens,
    slots,
    save_tokens,
    num_saves,
    num_seqs,
    num_decodes,
    max_short,  # tokens of a sequence that is not computed in chunks
    query_stride,  # from one token to the next
    key_stride,
    eps,
    query_scale,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,  # a power of two, at least KEY_DIM
    CHUNK: tl.constexpr,
    DTYPE: tl.constexpr,  # of the products' operands
    PRECISION: tl.constexpr,
):
    """Compute what needs no state, one head of a chunk; the grid is [most chunks, heads]."""
    start, end, index = find_chunk(
        cu_seqlens, slots, save_tokens, num_saves, num_seqs, num_decodes, max_short, tl.program_id(0), CHUNK
    )
    head = tl.program_id(1)
    if start < end:
        token, row = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
        length = end - start
        is_token, row_mask = token < length, row < KEY_DIM
        mask = is_token[:, None] & row_mask[None, :]
        key_at, decay_stride = head // HEADS_PER_KEY * KEY_DIM + row, NUM_HEADS * KEY_DIM
        row_at, first_decay = head * KEY_DIM + row, tl.cast(start, tl.int64) * decay_stride
        of_keys, of_queries = _within_blocks(
            query + tl.cast(start, tl.int64) * query_stride + key_at[None, None, :],
            key + tl.cast(start, tl.int64) * key_stride + key_at[None, None, :],
            decay + first_decay + row_at[None, None, :],
            (query_stride, key_stride, decay_stride),
            length,
            row_mask[None, None, :],
            CHUNK,
            BLOCK_KEY,
        )
        k = load_rows(key, start, key_stride, token[:, None] * key_stride + key_at[None, :], mask).to(tl.float32)
        q = load_rows(query, start, query_stride, token[:, None] * query_stride + key_at[None, :], mask).to(tl.float32)
        decays_at = token[:, None] * decay_stride + row_at[None, :]
        sums = tl.cumsum(bounded(load_rows(decay, start, decay_stride, decays_at, mask)), axis=0)
        of_keys, of_queries = _add_between_blocks(of_keys, of_queries, k, q, sums, CHUNK, DTYPE, PRECISION)
        key_norms, query_norms = reciprocal_norms(k, eps), reciprocal_norms(q, eps) * query_scale
        whole = tl.sum(tl.where((token == length - 1)[:, None], sums, 0.0), axis=0)
        upto, after = tl.exp(sums), tl.exp(tl.minimum(whole[None, :] - sums, 0.0))
        tl.store(read_queries + first_decay + decays_at, rounded(q * query_norms[:, None] * upto, DTYPE), mask=mask)
        tl.store(read_keys + first_decay + decays_at, rounded(k * key_norms[:, None] * upto, DTYPE), mask=mask)
        tl.store(written_keys + first_decay + decays_at, rounded(k * key_norms[:, None] * after, DTYPE), mask=mask)
        tl.store(kept + (index * NUM_HEADS + head) * KEY_DIM + row, tl.exp(whole), mask=row_mask)
        numbers_at, first_number = token * NUM_HEADS + head, tl.cast(start, tl.int64) * NUM_HEADS
        strengths = load_rows(beta, start, NUM_HEADS, numbers_at, is_token)
        to = first_number * CHUNK + numbers_at[:, None] * CHUNK + token[None, :]
        of_queries = of_queries * query_norms[:, None] * key_norms[None, :]
        is_later = token[:, None] >= token[None, :]
        tl.store(scores + to, rounded(tl.where(is_later, of_queries, 0.0), DTYPE), mask=is_token[:, None])
        of_keys = of_keys * (strengths * key_norms)[:, None] * key_norms[None, :]
        lower = tl.where(token[:, None] > token[None, :], of_keys, 0.0)
        solved = inverse(lower, CHUNK, PRECISION) * strengths[None, :]
        tl.store(solutions + to, rounded(solved, DTYPE), mask=is_token[:, None])
