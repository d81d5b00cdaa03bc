"""What the kernels that compute prompts in chunks share: where chunks begin, their decays, products and inverses.

A sequence's tokens of a step are cut after each token whose state is saved; each part is cut into chunks of CHUNK
tokens, and its last chunk may be shorter. So a saved state is always the state at the end of a chunk:

    tokens of a sequence   [ a a a a a a a a a a a a ]      CHUNK is 4, the state after the seventh token is saved
    chunks                 [ 0 0 0 0|1 1 1|2 2 2 2|3 ]

Nothing is planned on the host: a program finds its chunks in the batch, so a CUDA graph follows any batch of its shape.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.triton.saves import first_save, save_token

__all__ = [
    "bounded",
    "chunk_decays",
    "chunk_index",
    "find_chunk",
    "inverse",
    "load_rows",
    "on_diagonal",
    "product",
    "reciprocal_norms",
    "rounded",
    "segment_end",
]

_TILE = tl.constexpr(16)  # rows of the blocks that are inverted by substitution
_MOST_FLOAT16 = tl.constexpr(65504.0)
_MOST_DECAY = tl.constexpr(-100.0)  # of a token: e^-100 is zero in float32, and sums of it keep their precision


@triton.jit
def segment_end(save_tokens, num_saves, save, end):
    """Return where the chunks that lead to a save end, or the sequence's tokens if these end before."""
    return tl.minimum(save_token(save_tokens, num_saves, save), end - 1) + 1


@triton.jit
def _first_chunk(cu_seqlens, save_tokens, num_saves, sequence, CHUNK: tl.constexpr):
    """Return the index of a sequence's first chunk."""
    first = tl.load(cu_seqlens + sequence)
    return chunk_index(first, sequence, first_save(save_tokens, num_saves, first), CHUNK)


@triton.jit
def find_chunk(
    cu_seqlens, slots, save_tokens, num_saves, num_seqs, num_decodes, max_short, program, CHUNK: tl.constexpr
):
    """Return the chunk of a program, for at most one chunk each; the first ``num_decodes`` sequences have none.

    Returns:
        Its first token, the token after its last, and its index. The chunk may be empty.
    """
    index = num_decodes // CHUNK + num_decodes + program
    low, high = tl.cast(num_decodes, tl.int32), tl.cast(num_seqs, tl.int32)
    while low + 1 < high:
        middle = (low + high) // 2
        is_later = _first_chunk(cu_seqlens, save_tokens, num_saves, middle, CHUNK) > index
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    sequence = low
    first, last = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    save, high = first_save(save_tokens, num_saves, first), first_save(save_tokens, num_saves, last) + 1
    segment = first
    while save + 1 < high:
        middle = (save + high) // 2
        start = tl.load(save_tokens + middle - 1) + 1
        is_later = chunk_index(start, sequence, middle, CHUNK) > index
        segment = tl.where(is_later, segment, start)
        save = tl.where(is_later, save, middle)
        high = tl.where(is_later, middle, high)
    chunk = index - chunk_index(segment, sequence, save, CHUNK)
    stop = segment_end(save_tokens, num_saves, save, last)
    is_chunked = (tl.load(slots + sequence) >= 0) & (last - first > max_short) & (chunk >= 0)
    start = tl.where(is_chunked, segment + chunk * CHUNK, last)
    return start, tl.minimum(start + CHUNK, stop), index


@triton.jit
def chunk_index(segment, sequence, save, CHUNK: tl.constexpr):
    """Return the index of a segment's first chunk among all; that of its next ones follows.

    No two chunks have the same index, though some have none: an index of a later segment is larger by at least the
    rounded down chunks between them, and by one for the sequence or the save between them.

    Args:
        segment: the segment's first token: after a save, or a sequence's first one.
        sequence: its sequence.
        save: the index of the first save after ``segment``.

    Returns:
        The index, below num_tokens // CHUNK + num_seqs + num_saves.
    """
    return segment // CHUNK + sequence + save


@triton.jit
def load_rows(rows, start, stride, offset, mask):
    """Load the rows of a chunk of [num_tokens, ...], whose tokens are ``stride`` elements apart, at ``offset``."""
    return tl.load(rows + tl.cast(start, tl.int64) * stride + offset, mask=mask, other=0.0)


@triton.jit
def rounded(matrix, DTYPE: tl.constexpr):
    """Return a matrix in the dtype of products; in float16 a state that is out of range becomes the largest number."""
    if tl.float16 == DTYPE and matrix.dtype == tl.float32:
        matrix = tl.clamp(matrix, -_MOST_FLOAT16, _MOST_FLOAT16)
    return matrix.to(DTYPE)


@triton.jit
def product(a, b, sums, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``a @ b + sums``, float32: the operands are rounded to DTYPE; PRECISION is how float32 is multiplied."""
    return tl.dot(rounded(a, DTYPE), rounded(b, DTYPE), sums, input_precision=PRECISION)


@triton.jit
def reciprocal_norms(vectors, eps):
    """Return what the vectors [rows, columns] are multiplied with to have length 1."""
    vectors = vectors.to(tl.float32)
    return tl.rsqrt(tl.sum(vectors * vectors, axis=1) + eps)


@triton.jit
def bounded(decay):
    """Return decays of tokens; each leaves at least e^-100."""
    return tl.maximum(decay, _MOST_DECAY)


@triton.jit
def on_diagonal(CHUNK: tl.constexpr):
    """Return whether two blocks of a chunk's tokens are the same, [blocks, 1, blocks, 1]."""
    block = tl.arange(0, CHUNK // _TILE)
    return block[:, None, None, None] == block[None, None, :, None]


@triton.jit
def chunk_decays(decay, CHUNK: tl.constexpr, SUM_DTYPE: tl.constexpr):
    """Return e to the sums of decays [CHUNK]: up to each token, after it, between two, and of the chunk.

    No exponent is positive, so nothing overflows. Differences of sums cancel, which float64 as SUM_DTYPE prevents.

    Returns:
        e^(d_0 + ... + d_i) [CHUNK], e^(d_i+1 + ...) [CHUNK], e^(d_j+1 + ... + d_i) for j <= i, else 0 [CHUNK, CHUNK],
        and e to the sum of all.
    """
    decay = bounded(decay).to(SUM_DTYPE)
    upto = tl.cumsum(decay, axis=0)
    whole = tl.sum(decay, axis=0)
    index = tl.arange(0, CHUNK)
    is_later = index[:, None] >= index[None, :]
    between = tl.where(is_later, upto[:, None] - upto[None, :], 0.0).to(tl.float32)
    after = tl.minimum((whole - upto).to(tl.float32), 0.0)  # the two sums may be rounded in different orders
    return (
        tl.exp(upto.to(tl.float32)),
        tl.exp(after),
        tl.where(is_later, tl.exp(tl.minimum(between, 0.0)), 0.0),
        tl.exp(whole.to(tl.float32)),
    )


@triton.jit
def inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + ``lower``, float32 [CHUNK, CHUNK]; ``lower`` is zero on and above the diagonal.

    The inverses D of the blocks of 1, 2, 4, ... rows on the diagonal are merged in pairs, all at the same time: with L
    between the two blocks of each pair, the next ones are D - D L D. That is forward substitution by blocks, whose
    intermediate results are as small as the inverse; a product of powers of ``lower`` would take fewer steps, but the
    powers are huge where keys are alike.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    none = tl.zeros([CHUNK, CHUNK], tl.float32)
    inverses = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -lower, 0.0))
    for level in tl.static_range(1, 7):
        if 2 << level <= CHUNK:
            is_between = (row >> level + 1 == column >> level + 1) & (row >> level > column >> level)
            carried = product(tl.where(is_between, lower, 0.0), inverses, none, tl.float32, PRECISION)
            inverses -= product(inverses, carried, none, tl.float32, PRECISION)
    return inverses
