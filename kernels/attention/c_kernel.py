"""Attention in C, float32 and bfloat16, paged and of whole texts without a cache (csrc/attention/attention.h).

`is_supported` says what the C kernel computes; sdpa.py computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from kernels.attention.base import AttentionInputs
from kernels.attention.window import sliding_and_chunk
from kernels.cpu.bindings import CAttentionCall
from kernels.cpu.library import library, require

__all__ = ["PackedTexts", "is_supported", "packed_attention", "paged_attention"]

_INT32_MAX = 2**31 - 1
_LARGEST_VALUE_DIM = 512  # as in attention_item.h
_DIMENSIONS_AT_A_TIME = 16
_DTYPES = (torch.float32, torch.bfloat16)


def is_supported(dtype: torch.dtype, head_dim: int, value_dim: int | None = None) -> bool:
    """Return whether `paged_attention` computes this on this machine; compiles the library if necessary.

    Args:
        dtype: of the cache.
        head_dim: elements of a key.
        value_dim: elements of a value; None: as many.
    """
    value_dim = head_dim if value_dim is None else value_dim
    are_whole = head_dim % _DIMENSIONS_AT_A_TIME == value_dim % _DIMENSIONS_AT_A_TIME == 0
    fits = dtype in _DTYPES and are_whole and 0 < value_dim <= min(head_dim, _LARGEST_VALUE_DIM)
    return fits and library() is not None


def paged_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute `AttentionBackend.forward`; any number of threads may call at once."""
    metadata = inputs.metadata
    texts = PackedTexts(metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables)
    windows = *sliding_and_chunk(inputs.window), 0
    caches = inputs.key_cache, inputs.value_cache
    return _attend(inputs.query, *caches, inputs.value_dim, texts, windows, inputs.scale, inputs.softcap or 0.0)


class PackedTexts(NamedTuple):
    """Where the tokens of texts lie that follow each other in one tensor, and their keys in a cache. All int32.

    Attributes:
        cu_seqlens: [num_texts + 1], where each text begins.
        seq_lens: [num_texts].
        block_tables: [num_texts, max_blocks].
    """

    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedTexts:
        """Return texts of these lengths, whose keys follow each other as their tokens do: each is a block."""
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        cu_seqlens = F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        positions = torch.arange(max(lengths), dtype=torch.int32)
        blocks = torch.where(positions < seq_lens[:, None], cu_seqlens[:-1, None] + positions, -1)
        return cls(cu_seqlens, seq_lens, blocks)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    texts: PackedTexts,
    *,
    left: int | None,
    right: int | None,
    scale: float,
) -> torch.Tensor:
    """Compute attention within each of several texts.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim]; ``value`` likewise.
        texts: made by ``PackedTexts.of``.
        left: tokens before its own that a token sees; None: all.
        right: tokens after its own that it sees; None: all.
        scale: of the scores.

    Returns:
        [num_tokens, num_heads, head_dim]. A text's numbers have the same bits whatever the other texts are.
    """
    windows = 0 if left is None else left + 1, 0, _INT32_MAX if right is None else right
    keys, values = key.unsqueeze(1).contiguous(), value.unsqueeze(1).contiguous()
    return _attend(query, keys, values, query.shape[2], texts, windows, scale, 0.0)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    value_dim: int,
    texts: PackedTexts,
    windows: tuple[int, int, int],
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Call the kernel; ``windows`` are its sliding_window, chunk and right."""
    query = query.contiguous()
    _check(query, key_cache, value_cache, texts)
    output = query.new_empty(*query.shape[:2], value_dim)
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    call = CAttentionCall(
        output.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *(part.data_ptr() for part in texts),
        *texts.block_tables.shape,
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim,
        block_size,
        *windows,
        query.dtype == torch.bfloat16,
        scale,
        softcap,
    )
    require().pagoda_attention(call)
    return output


def _check(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, texts: PackedTexts) -> None:
    _, num_heads, head_dim = query.shape
    assert is_supported(query.dtype, head_dim, value_cache.shape[3]), (query.dtype, head_dim, value_cache.shape)
    assert query.dtype == key_cache.dtype == value_cache.dtype, (query.dtype, key_cache.dtype, value_cache.dtype)
    assert key_cache.stride() == value_cache.stride(), (key_cache.stride(), value_cache.stride())
    assert num_heads % key_cache.shape[2] == 0, (query.shape, key_cache.shape)
    assert head_dim == key_cache.shape[3], (query.shape, key_cache.shape)
    assert key_cache.is_contiguous(), key_cache.stride()
    for indices in texts:
        assert indices.dtype == torch.int32, indices.dtype
        assert indices.is_contiguous(), indices.stride()
