"""What kernels/cache must compute, as plainly as torch allows. Only tests use it."""

from __future__ import annotations

import torch

__all__ = ["store_kvcache"]


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Compute `kernels.cache.store_kvcache`; shapes and meaning are documented there."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            if value is not None and value_cache is not None:
                value_cache[slot // block_size, slot % block_size] = value[token]
