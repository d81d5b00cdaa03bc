"""What the kernels of this folder must compute, as plainly as torch allows. Those of attention/ and cpu/ stand there.

Tests compare the kernels with these functions, which are slow and never used to serve.
"""

from __future__ import annotations

import torch


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Compute `kernels.store_kvcache`; shapes and meaning are documented there."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]


def argmax_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.argmax.argmax_rows`."""
    return rows.amax(dim=1), rows.argmax(dim=1)
