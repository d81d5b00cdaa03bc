"""What kernels/cache must compute, as plainly as torch allows. Only tests use it."""

from __future__ import annotations

import torch

from kernels.cache.fp8 import FP8, to_fp8

__all__ = ["store_kvcache"]


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Compute `kernels.cache.store_kvcache`; shapes and meaning are documented there."""
    block_size = key_cache.shape[1]
    if key_cache.dtype == FP8:
        key, value = to_fp8(key, key_scale), None if value is None else to_fp8(value, value_scale)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            if value is not None and value_cache is not None:
                value_cache[slot // block_size, slot % block_size] = value[token]
