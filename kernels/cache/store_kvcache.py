"""store_kvcache: writes a step's keys and values to their slots in the paged cache.

The caller decides which token goes to which slot; this module knows slots, not sequences.
"""

from __future__ import annotations

import torch

from kernels.cache.fp8 import FP8, to_fp8


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Copy token i's key and value into slot `slot_mapping[i]` of the caches.

    key, value    [num_tokens, num_kv_heads, head_dim], any strides: slices of a fused QKV output need no copy
    caches        [num_blocks, block_size, num_kv_heads, head_dim], contiguous; without values both are None
    slot_mapping  int64 [num_tokens], block_id * block_size + offset; a token whose slot is -1 is skipped
    scales        what keys and values are divided by before they are rounded to caches of FP8; see fp8.py
    """
    if key.device.type == "cpu":
        if key_cache.dtype == FP8:
            key = to_fp8(key, key_scale).view(torch.uint8)
            value = None if value is None else to_fp8(value, value_scale).view(torch.uint8)
            key_cache = key_cache.view(torch.uint8)
            value_cache = None if value_cache is None else value_cache.view(torch.uint8)
        _store_on_cpu(key, value, key_cache, value_cache, slot_mapping)
    else:
        from kernels.cache.triton.store_kvcache import store_kvcache_triton

        store_kvcache_triton(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def _store_on_cpu(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    written = slot_mapping >= 0
    if not bool(written.all()):  # only a padded step pays for the selection
        key, slot_mapping = key[written], slot_mapping[written]
        value = None if value is None else value[written]
    key_cache.view(-1, *key_cache.shape[2:])[slot_mapping] = key  # twice as fast as index_copy_
    if value is not None and value_cache is not None:
        value_cache.view(-1, *value_cache.shape[2:])[slot_mapping] = value
