"""Paged attention in C, float32 and bfloat16, decodes and chunks of prefills: csrc/attention.h, called with tensors.

`is_supported` says what the C kernel computes; sdpa.py computes the rest.
"""

from __future__ import annotations

import torch

from kernels.attention.base import AttentionInputs
from kernels.cpu.bindings import CAttentionCall
from kernels.cpu.library import library, require

__all__ = ["is_supported", "paged_attention"]

_LARGEST_HEAD_DIM = 256
_DIMENSIONS_AT_A_TIME = 16
_DTYPES = (torch.float32, torch.bfloat16)


def is_supported(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `paged_attention` computes this on this machine; compiles the library if need be."""
    fits = dtype in _DTYPES and 0 < head_dim <= _LARGEST_HEAD_DIM and head_dim % _DIMENSIONS_AT_A_TIME == 0
    return fits and library() is not None


def paged_attention(inputs: AttentionInputs) -> torch.Tensor:
    """Compute `AttentionBackend.forward`; any number of threads may call at once."""
    _check(inputs)
    query, metadata = inputs.query.contiguous(), inputs.metadata
    output = torch.empty_like(query)
    num_seqs, max_blocks = metadata.block_tables.shape
    call = CAttentionCall(
        output=output.data_ptr(),
        query=query.data_ptr(),
        key_cache=inputs.key_cache.data_ptr(),
        value_cache=inputs.value_cache.data_ptr(),
        cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        num_seqs=num_seqs,
        max_blocks=max_blocks,
        num_heads=inputs.num_heads,
        num_kv_heads=inputs.num_kv_heads,
        head_dim=inputs.head_dim,
        block_size=inputs.block_size,
        sliding_window=inputs.sliding_window or 0,
        is_bf16=query.dtype == torch.bfloat16,
        scale=inputs.scale,
    )
    require().pagoda_attention(call)
    return output


def _check(inputs: AttentionInputs) -> None:
    query, key_cache, value_cache = inputs.query, inputs.key_cache, inputs.value_cache
    assert is_supported(query.dtype, inputs.head_dim), (query.dtype, inputs.head_dim)
    assert query.dtype == key_cache.dtype == value_cache.dtype, (query.dtype, key_cache.dtype, value_cache.dtype)
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert inputs.num_heads % inputs.num_kv_heads == 0, (inputs.num_heads, inputs.num_kv_heads)
    assert inputs.head_dim == key_cache.shape[3], (query.shape, key_cache.shape)
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    metadata = inputs.metadata
    for indices in (metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables):
        assert indices.dtype == torch.int32, indices.dtype
        assert indices.is_contiguous(), indices.stride()
