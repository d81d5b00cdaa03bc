"""Paged attention in C, float32 and bfloat16, decodes and chunks of prefills (csrc/attention/attention.h).

`is_supported` says what the C kernel computes; sdpa.py computes the rest.
"""

from __future__ import annotations

import torch

from kernels.attention.base import AttentionInputs
from kernels.attention.window import sliding_and_chunk
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.bindings import CAttentionCall
from kernels.cpu.library import library, require

__all__ = ["is_supported", "paged_attention"]

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
    query, key_cache, metadata = inputs.query.contiguous(), inputs.key_cache, inputs.metadata
    _check(query, key_cache, inputs.value_cache, metadata)
    output = query.new_empty(*query.shape[:2], inputs.value_dim)
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_seqs, max_blocks = metadata.block_tables.shape
    call = CAttentionCall(
        output.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        inputs.value_cache.data_ptr(),
        metadata.cu_seqlens_q.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
        num_seqs,
        max_blocks,
        num_heads,
        num_kv_heads,
        head_dim,
        inputs.value_dim,
        block_size,
        *sliding_and_chunk(inputs.window),
        query.dtype == torch.bfloat16,
        inputs.scale,
        inputs.softcap or 0.0,
    )
    require().pagoda_attention(call)
    return output


def _check(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, metadata: AttentionMetadata
) -> None:
    _, num_heads, head_dim = query.shape
    assert is_supported(query.dtype, head_dim, value_cache.shape[3]), (query.dtype, head_dim, value_cache.shape)
    assert query.dtype == key_cache.dtype == value_cache.dtype, (query.dtype, key_cache.dtype, value_cache.dtype)
    assert key_cache.stride() == value_cache.stride(), (key_cache.stride(), value_cache.stride())
    assert num_heads % key_cache.shape[2] == 0, (query.shape, key_cache.shape)
    assert head_dim == key_cache.shape[3], (query.shape, key_cache.shape)
    assert key_cache.is_contiguous(), key_cache.stride()
    for indices in (metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables):
        assert indices.dtype == torch.int32, indices.dtype
        assert indices.is_contiguous(), indices.stride()
