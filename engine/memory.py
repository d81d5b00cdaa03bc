"""How many KV blocks fit: from the GPU's measured free memory, or from what the host is asked to give.

Bytes are one tensor-parallel rank's: what is given for the whole engine is divided among the ranks.
"""

from __future__ import annotations

import logging
import os

import torch

from engine.config import EngineConfig, parse_memory
from engine.errors import ConfigError

__all__ = ["blocks_that_fit", "gpu_memory_for_cache", "host_memory_for_cache"]

logger = logging.getLogger(__name__)

_HOST_DEFAULT = 4 * 2**30


def host_memory_for_cache(config: EngineConfig) -> int:
    """Return a CPU rank's part of the KV pool: of ``kv_cache_memory``, else of 4 GiB or a quarter of what is free."""
    if config.kv_cache_memory is not None:
        return _part_of(config)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_HOST_DEFAULT, free // 4) // config.tensor_parallel_size


def _part_of(config: EngineConfig) -> int:
    assert config.kv_cache_memory is not None
    return parse_memory(config.kv_cache_memory, "kv_cache_memory") // config.tensor_parallel_size


def gpu_memory_for_cache(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes left for the KV pool after the warm-up whose peak torch has recorded on ``device``."""
    if config.kv_cache_memory is not None:
        return _part_of(config)
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    peak_activations = statistics["allocated_bytes.all.peak"] - statistics["allocated_bytes.all.current"]
    reusable = torch.cuda.memory_reserved(device) - statistics["allocated_bytes.all.current"]
    taken_by_others = total - free - torch.cuda.memory_reserved(device)
    budget = int(total * config.gpu_memory_utilization)
    weights = statistics["allocated_bytes.all.current"]
    left = budget - taken_by_others - weights - peak_activations
    logger.info("GPU memory: %.2f GiB in all, %.2f weights, %.2f activations, %.2f for the KV cache",
                total / 2**30, weights / 2**30, peak_activations / 2**30, left / 2**30)  # fmt: skip
    return int(min(left, free + reusable - peak_activations))


def blocks_that_fit(memory: int, bytes_per_block: int, useful: int) -> int:
    """Return the number of blocks in ``memory`` bytes, at most the ``useful`` ones.

    Raises:
        ConfigError: if not even one block fits.
    """
    num_blocks = min(memory // bytes_per_block, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"{memory / 2**20:.1f} MiB are left for the KV cache, but one block takes {bytes_per_block / 2**20:.1f} "
            "MiB; raise kv_cache_memory or gpu_memory_utilization, or lower max_num_batched_tokens or block_size"
        )
    return num_blocks
