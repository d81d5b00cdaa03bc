"""What the gated delta rule of prompts computes of each chunk before its state is known, as a Triton kernel.

The delta rule in chunks is Yang et al.'s, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(2024); with decays, "Gated Delta Networks" (2024). In a chunk that begins with the state S, with keys k_i of length 1,
g_i the sum of decays up to token i, G the sum of all, and b_i beta, a token changes the state by k_i c_i^T, where

    c_i = b_i (v_i - e^g_i k_i S - sum over j < i of e^(g_i - g_j) (k_i k_j) c_j)

That is a triangular system. With A_ij = b_i e^(g_i - g_j) k_i k_j below the diagonal, and T = (I + A)^-1 b, its
solution is C = T (V - e^g K S). So

    here, each chunk on its own:       T, and P_ij = e^(g_i - g_j) q_i k_j for j <= i
    in states.py, chunk after chunk:   C = T (V - e^g K S),  output e^g Q S + P C,  S = e^G S + (e^(G - g) K)^T C

The papers' W = T e^g K and U = T V would leave states.py one product less in its chain, and cost a third kernel and
twice the memory traffic. T and P are kept in memory between the kernels, in the dtype of the products; queries and keys
are read as they are, and products with them are scaled.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.chunks import (
    chunk_decays,
    find_chunk,
    inverse,
    load_rows,
    product,
    reciprocal_norms,
    rounded,
)

__all__ = ["delta_rule_chunks_kernel"]


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves", "num_seqs", "num_decodes", "max_short"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "save_tokens"],
)
def delta_rule_chunks_kernel(
    solutions,  # T, [num_tokens, NUM_HEADS, CHUNK]
    scores,  # P, [num_tokens, NUM_HEADS, CHUNK]
    scales,  # [num_tokens, NUM_HEADS, 3]: of queries that read the state, keys that write it, and keys that read it
    kept,  # of the state, [num_chunks, NUM_HEADS]
    query,  # [num_tokens, NUM_HEADS / HEADS_PER_KEY, KEY_DIM], a token's heads are contiguous
    key,
    decay,  # [num_tokens, NUM_HEADS]
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
    SUM_DTYPE: tl.constexpr,  # of sums of decays
):
    """Compute what needs no state, one head of a chunk; the grid is [most chunks, heads]."""
    start, end, index = find_chunk(
        cu_seqlens, slots, save_tokens, num_saves, num_seqs, num_decodes, max_short, tl.program_id(0), CHUNK
    )
    head = tl.program_id(1)
    if start < end:
        token, row = tl.arange(0, CHUNK), tl.arange(0, BLOCK_KEY)
        is_token = token < end - start
        key_at, mask = head // HEADS_PER_KEY * KEY_DIM + row[None, :], is_token[:, None] & (row < KEY_DIM)[None, :]
        k = load_rows(key, start, key_stride, token[:, None] * key_stride + key_at, mask)
        q = load_rows(query, start, query_stride, token[:, None] * query_stride + key_at, mask)
        numbers_at, first_number = token * NUM_HEADS + head, tl.cast(start, tl.int64) * NUM_HEADS
        strengths = load_rows(beta, start, NUM_HEADS, numbers_at, is_token)
        decays = load_rows(decay, start, NUM_HEADS, numbers_at, is_token)
        upto, after, between, whole = chunk_decays(decays, CHUNK, SUM_DTYPE)
        key_norms, query_norms = reciprocal_norms(k, eps), reciprocal_norms(q, eps) * query_scale
        scales_at = scales + (first_number + numbers_at) * 3
        tl.store(scales_at, query_norms * upto, mask=is_token)
        tl.store(scales_at + 1, key_norms * after, mask=is_token)
        tl.store(scales_at + 2, key_norms * upto, mask=is_token)
        tl.store(kept + index * NUM_HEADS + head, whole)
        none = tl.zeros([CHUNK, CHUNK], tl.float32)
        between *= key_norms[None, :]
        to = first_number * CHUNK + numbers_at[:, None] * CHUNK + token[None, :]
        alike = product(q, tl.trans(k), none, DTYPE, PRECISION) * between * query_norms[:, None]
        tl.store(scores + to, rounded(alike, DTYPE), mask=is_token[:, None])
        alike = product(k, tl.trans(k), none, DTYPE, PRECISION) * between * (key_norms * strengths)[:, None]
        solved = inverse(tl.where(token[:, None] > token[None, :], alike, 0.0), CHUNK, PRECISION) * strengths[None, :]
        tl.store(solutions + to, rounded(solved, DTYPE), mask=is_token[:, None])
