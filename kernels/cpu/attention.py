"""Attention over the paged cache in C: decodes and chunks of prefills, float32 and bfloat16; see csrc/attention.h.

Shapes and meaning are those of kernels/attention/base.py. This module turns tensors into one call of the library; what
the library does not compute, `is_supported` tells before.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.attention.base import AttentionMetadata
from kernels.cpu.library import library

__all__ = ["is_supported", "paged_attention"]

_LARGEST_HEAD_DIM = 256
_DIMENSIONS_AT_A_TIME = 16
_DTYPES = (torch.float32, torch.bfloat16)


class _Call(ctypes.Structure):
    """pagoda_attention_call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("output", "query", "key_cache", "value_cache")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "seq_lens", "block_tables")),
        *((name, ctypes.c_int32) for name in ("num_seqs", "max_blocks", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "block_size", "sliding_window", "is_bf16")),
        ("scale", ctypes.c_float),
    )


def is_supported(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `paged_attention` computes this on this machine; the library is compiled now if need be."""
    fits = dtype in _DTYPES and 0 < head_dim <= _LARGEST_HEAD_DIM and head_dim % _DIMENSIONS_AT_A_TIME == 0
    return fits and library() is not None


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute `AttentionBackend.forward`; any number of threads may call at once."""
    loaded = library()
    assert loaded is not None, "the CPU kernels are not available; is_supported tells"
    query = query.contiguous()
    output = torch.empty_like(query)
    call = _call(output, query, key_cache, value_cache, metadata)
    call.scale = scale
    call.sliding_window = sliding_window or 0
    loaded.pagoda_attention(ctypes.byref(call))
    return output


def _call(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> _Call:
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    num_seqs, max_blocks = metadata.block_tables.shape
    num_heads = query.shape[1]
    assert is_supported(query.dtype, head_dim), (query.dtype, head_dim)
    assert query.dtype == key_cache.dtype == value_cache.dtype, (query.dtype, key_cache.dtype, value_cache.dtype)
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert query.shape[2] == head_dim, (query.shape, key_cache.shape)
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    for indices in (metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables):
        assert indices.dtype == torch.int32, indices.dtype
        assert indices.is_contiguous(), indices.stride()
    return _Call(
        output=output.data_ptr(),
        query=query.data_ptr(),
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        num_seqs=num_seqs,
        max_blocks=max_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        is_bf16=query.dtype == torch.bfloat16,
    )
