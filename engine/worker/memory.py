"""How many KV blocks fit: from the GPU's measured free memory, or from what the host has and is asked to give.

Bytes are one tensor-parallel rank's: what is given for the whole engine is divided among the ranks.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError

__all__ = [
    "available_host_memory",
    "blocks_that_fit",
    "gpu_memory_for_cache",
    "host_blocks_for",
    "host_memory_for_cache",
]

logger = logging.getLogger(__name__)

_HOST_DEFAULT = 4 * 2**30


def host_memory_for_cache(config: EngineConfig) -> int:
    """Return a CPU rank's part of the KV pool: of ``kv_cache_memory``, else of 4 GiB or a quarter of what is free."""
    if config.kv_cache_memory is not None:
        return _part_of(config)
    return min(_HOST_DEFAULT, available_host_memory() // 4) // config.tensor_parallel_size


def host_blocks_for(swap_space_gib: float, bytes_per_block: int) -> int:
    """Return the blocks of one rank's host pool, into which ``swap_space_gib`` GiB are to be cut; 0 asks for none.

    Raises:
        ConfigError: if the machine has not that much memory available, or if not even one block fits.
    """
    if swap_space_gib == 0:
        return 0
    available = available_host_memory()
    if swap_space_gib * 2**30 > available:
        raise ConfigError(
            f"swap_space_gib={swap_space_gib} exceeds the {available / 2**30:.2f} GiB of memory that this machine has "
            "available; lower it, or set it 0 to recompute preempted sequences"
        )
    num_blocks = int(swap_space_gib * 2**30) // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space_gib={swap_space_gib} holds no block, which takes {bytes_per_block / 2**20:.2f} MiB; raise it, "
            "or set it 0 to recompute preempted sequences"
        )
    return num_blocks


def available_host_memory() -> int:
    """Return the bytes that new processes can use without swapping, of the machine or of the container around us."""
    return min(_machine_memory(), _container_memory())


def _machine_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):  # unlike SC_AVPHYS_PAGES it counts the page cache, which gives way
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what the limit of our cgroup (version 2) leaves, or more than there is if it has none."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return 2**63
    if limit == "max":
        return 2**63
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))  # page cache gives way here too


def _part_of(config: EngineConfig) -> int:
    assert isinstance(config.kv_cache_memory, int)  # EngineConfig has parsed text
    return config.kv_cache_memory // config.tensor_parallel_size


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
    logger.info(
        "GPU memory: %.2f GiB in all, %.2f weights, %.2f activations, %.2f for the KV cache",
        total / 2**30,
        weights / 2**30,
        peak_activations / 2**30,
        left / 2**30,
    )
    return int(min(left, free + reusable - peak_activations))


def blocks_that_fit(memory: int, bytes_per_block: int, useful: int) -> int:
    """Return the number of blocks in ``memory`` bytes, at most the ``useful`` ones.

    Raises:
        ConfigError: if not even one block fits.
    """
    num_blocks = min(memory // bytes_per_block, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"{max(memory, 0) / 2**20:.1f} MiB are left for the KV cache, but one block takes "
            f"{bytes_per_block / 2**20:.1f} MiB; raise kv_cache_memory or gpu_memory_utilization, or lower "
            "max_num_batched_tokens or block_size"
        )
    return num_blocks
