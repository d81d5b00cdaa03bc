"""What Mamba 2's recurrence of prompts computes of each chunk before its state is known, as a Triton kernel.

Chunks are the state-space duality of Dao and Gu, "Transformers are SSMs" (2024). In a chunk that begins with the state
S, with g_i the sum of dt A up to token i and G the sum of all,

    output_i = e^g_i S C_i + sum over j <= i of e^(g_i - g_j) (B_j C_i) dt_j x_j + D x_i
    S = e^G S + sum over j of e^(G - g_j) dt_j x_j B_j

The factors of x in the output, P_ij, need no state: they are computed here for each chunk on its own, with D on the
diagonal. states.py multiplies them, and carries the state.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.chunks import chunk_decays, find_chunk, load_rows, product, rounded

__all__ = ["scan_chunks_kernel"]


# Steps differ in their saves and in the alignment of their batch, and a step must not wait for a compilation.
@triton.jit(
    do_not_specialize=["num_saves", "num_seqs", "num_decodes", "max_short"],
    do_not_specialize_on_alignment=["cu_seqlens", "slots", "save_tokens"],
)
def scan_chunks_kernel(
    scores,  # P, [num_tokens, NUM_HEADS, CHUNK]
    scales,  # [num_tokens, NUM_HEADS, 2]: of queries that read the state, and of keys that write it
    kept,  # of the state, [num_chunks, NUM_HEADS]
    steps,  # [num_tokens, NUM_HEADS]
    decay,  # [NUM_HEADS]
    keys,  # [num_tokens, NUM_HEADS / HEADS_PER_GROUP, STATE_SIZE], a token's groups are contiguous
    queries,
    skip,  # [NUM_HEADS]
    cu_seqlens,
    slots,
    save_tokens,
    num_saves,
    num_seqs,
    num_decodes,
    max_short,  # tokens of a sequence that is not computed in chunks
    key_stride,  # from one token to the next
    query_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_STATE: tl.constexpr,  # a power of two, at least STATE_SIZE
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
        token, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_STATE)
        is_token = token < end - start
        group_at = head // HEADS_PER_GROUP * STATE_SIZE + column[None, :]
        mask = is_token[:, None] & (column < STATE_SIZE)[None, :]
        k = load_rows(keys, start, key_stride, token[:, None] * key_stride + group_at, mask)
        q = load_rows(queries, start, query_stride, token[:, None] * query_stride + group_at, mask)
        numbers_at, first_number = token * NUM_HEADS + head, tl.cast(start, tl.int64) * NUM_HEADS
        step = load_rows(steps, start, NUM_HEADS, numbers_at, is_token)
        upto, after, between, whole = chunk_decays(step * tl.load(decay + head), CHUNK, SUM_DTYPE)
        tl.store(scales + (first_number + numbers_at) * 2, upto, mask=is_token)
        tl.store(scales + (first_number + numbers_at) * 2 + 1, after * step, mask=is_token)
        tl.store(kept + index * NUM_HEADS + head, whole)
        none = tl.zeros([CHUNK, CHUNK], tl.float32)
        factors = product(q, tl.trans(k), none, DTYPE, PRECISION) * between * step[None, :]
        factors += tl.where(token[:, None] == token[None, :], tl.load(skip + head), 0.0)
        to = first_number * CHUNK + numbers_at[:, None] * CHUNK + token[None, :]
        tl.store(scores + to, rounded(factors, DTYPE), mask=is_token[:, None])
