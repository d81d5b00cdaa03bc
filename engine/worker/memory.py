"""How many KV blocks fit: from the measured free memory of a GPU, or from the host's available memory.

All sizes are those of one tensor-parallel rank: options for the whole engine are divided by the number of ranks.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.pool_sizes import PageSizes, PoolSizes, pages_in_reach, snapshots_left
from kernels.cgroup import available_memory

__all__ = [
    "available_host_memory",
    "blocks_that_fit",
    "default_swap_space",
    "gpu_memory_for_cache",
    "host_memory_for_cache",
    "host_pools_for",
    "pools_of_blocks",
    "pools_that_fit",
]

logger = logging.getLogger(__name__)

_HOST_DEFAULT = 4 * 2**30
_HOST_SHARE = 1 / 8  # of available memory, and
_HOST_RATIO = 4  # times the KV cache, at most, for the host pools if their size is not configured
_TYPICAL_TOKENS = 4096  # of a sequence, for which memory is divided between the kinds of pages
_FEWEST_SEQUENCES = 8  # that have pages and states, where num_blocks is set and short


def host_memory_for_cache(config: EngineConfig) -> int:
    """Return the bytes of a CPU rank's KV pool.

    The engine's pool takes ``kv_cache_memory``; without that option 4 GiB, but at most a quarter of available memory.
    """
    if config.kv_cache_memory is not None:
        return _configured_bytes(config)
    return min(_HOST_DEFAULT, available_host_memory() // 4) // config.tensor_parallel_size


def host_pools_for(
    config: EngineConfig, pools: PoolSizes, sizes: PageSizes, max_model_len: int, *, is_on_gpu: bool = False
) -> PoolSizes:
    """Return ``pools`` with those on the host, which take ``swap_space_gib``, divided as the memory of the device.

    Args:
        config: the engine's options.
        pools: of the device.
        sizes: of the pages of one rank.
        max_model_len: tokens of the longest sequence.
        is_on_gpu: whether the host pools are pinned memory, which is taken at once.

    Raises:
        ConfigError: if the machine has less memory available, or if not even one block fits.
    """
    swap_space_gib = config.swap_space_gib
    if swap_space_gib is None:
        return _default_host_pools(config, pools, sizes, num_tokens=max_model_len, is_on_gpu=is_on_gpu)
    if swap_space_gib == 0:
        return pools
    available = available_host_memory()
    if swap_space_gib * 2**30 > available:
        raise ConfigError(
            f"swap_space_gib={swap_space_gib} exceeds the {available / 2**30:.2f} GiB of memory that this machine has "
            "available; lower it, or set it 0 to recompute preempted sequences"
        )
    num_snapshots = _num_snapshots(config)
    pools = _with_host(config, pools, sizes, int(swap_space_gib * 2**30), max_model_len)
    if pools.num_host_blocks < 1:
        num_bytes = sizes.bytes_of_sequence(1, num_snapshots) * config.tensor_parallel_size
        raise ConfigError(
            f"swap_space_gib={swap_space_gib} holds no block, which takes {num_bytes / 2**20:.2f} MiB; raise it, "
            "or set it 0 to recompute preempted sequences"
        )
    return pools


def _with_host(config: EngineConfig, pools: PoolSizes, sizes: PageSizes, memory: int, max_model_len: int) -> PoolSizes:
    """Return ``pools`` with those on the host, which take ``memory`` bytes on all ranks."""
    return sizes.with_host(
        pools,
        memory // config.tensor_parallel_size,
        num_tokens=min(max_model_len, config.typical_seq_len or _TYPICAL_TOKENS),
        num_snapshots=_num_snapshots(config),
    )


def default_swap_space(kv_bytes: int) -> int:
    """Return the bytes of the host pools of an engine on a CPU if no size is configured.

    Args:
        kv_bytes: of its KV cache.
    """
    return min(_HOST_DEFAULT, int(available_host_memory() * _HOST_SHARE), _HOST_RATIO * kv_bytes)


def _default_host_pools(
    config: EngineConfig, pools: PoolSizes, sizes: PageSizes, *, num_tokens: int, is_on_gpu: bool
) -> PoolSizes:
    """Return ``pools`` with those on the host if no size is configured: none on a GPU, whose host memory is pinned.

    On a CPU they take a share of what is available, so that it does not matter much where nothing is ever evicted:
    their memory is taken page by page, little ahead of its use.
    """
    if is_on_gpu:
        return pools
    memory = default_swap_space(sizes.num_bytes(pools) * config.tensor_parallel_size)
    with_host = _with_host(config, pools, sizes, memory, num_tokens)
    if with_host.num_host_blocks < 1:
        return pools
    logger.info(
        "swap_space_gib is not set: %.2f GiB of host memory, taken little by little ahead of its use (an eighth of "
        "what is available, at most 4 GiB and %d times the KV cache)",
        memory / 2**30,
        _HOST_RATIO,
    )
    return with_host


def available_host_memory() -> int:
    """Return the bytes that can be allocated without swapping, on this machine and within its limits (cgroups)."""
    return min(_machine_memory(), available_memory())


def _machine_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            # Unlike SC_AVPHYS_PAGES it counts the page cache, which can be dropped.
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _configured_bytes(config: EngineConfig) -> int:
    assert isinstance(config.kv_cache_memory, int)  # EngineConfig has parsed the text
    return config.kv_cache_memory // config.tensor_parallel_size


def gpu_memory_for_cache(config: EngineConfig, device: torch.device, useful: int, graphs: int = 0) -> int:
    """Return the bytes for the KV pool: ``kv_cache_memory``, or what ``gpu_memory_utilization`` leaves.

    Torch must have recorded the peak memory of the warm-up's largest step on ``device``.

    Args:
        useful: bytes of the largest pool that the engine can use.
        graphs: bytes that CUDA graphs will take; they are captured after the pool is allocated.

    Raises:
        ConfigError: if a step and ``kv_cache_memory`` need more memory than the GPU has free.
    """
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    weights, reserved = statistics["allocated_bytes.all.current"], torch.cuda.memory_reserved(device)
    peak_activations = statistics["allocated_bytes.all.peak"] - weights
    available = int(free + reserved - weights - peak_activations - graphs)
    if config.kv_cache_memory is not None:
        wanted = min(_configured_bytes(config), useful)
        if wanted > available:
            raise ConfigError(
                f"kv_cache_memory takes {wanted / 2**30:.2f} GiB of {device}, which has {available / 2**30:.2f} GiB "
                "left after the warm-up; lower it, or end other processes on this GPU"
            )
        return wanted
    used_by_other_processes = total - free - reserved
    left = int(total * config.gpu_memory_utilization) - used_by_other_processes - weights - peak_activations - graphs
    logger.info(
        "GPU memory: %.2f GiB in all, %.2f weights, %.2f activations, %.2f CUDA graphs, %.2f for the KV cache",
        total / 2**30,
        weights / 2**30,
        peak_activations / 2**30,
        graphs / 2**30,
        left / 2**30,
    )
    return int(min(left, available))


def pools_that_fit(config: EngineConfig, sizes: PageSizes, memory: int, max_model_len: int) -> PoolSizes:
    """Return the pools into which ``memory`` bytes are divided, at most as large as the engine can use.

    Raises:
        ConfigError: if not even one block fits, or not one sequence.
    """
    if sizes.are_blocks_alone:
        max_useful = config.max_num_seqs * -(-max_model_len // sizes.block_size)
        return PoolSizes(blocks_that_fit(memory, sizes.block, max_useful))
    num_tokens, num_snapshots = min(max_model_len, config.typical_seq_len or _TYPICAL_TOKENS), _num_snapshots(config)
    limits = {
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_step_tokens": config.tokens_per_step,
        "num_snapshots": num_snapshots,
    }
    while not (pools := sizes.divide(memory, num_tokens=num_tokens, **limits)).num_blocks and num_tokens > 1:
        num_tokens //= 2
    if not pools.num_blocks:
        raise ConfigError(
            f"{max(memory, 0) / 2**20:.1f} MiB are left for the KV cache, but one sequence takes at least "
            f"{sizes.bytes_of_sequence(1, num_snapshots) / 2**20:.1f} MiB; raise kv_cache_memory or "
            f"gpu_memory_utilization, or lower {'state_snapshots or ' if sizes.slot else ''}max_num_batched_tokens"
        )
    return pools


def pools_of_blocks(config: EngineConfig, sizes: PageSizes) -> PoolSizes:
    """Return the pools for the configured number of blocks: as many of the other pages as these can be used with."""
    assert config.num_blocks is not None
    num_tokens, num_snapshots = config.typical_seq_len or _TYPICAL_TOKENS, _num_snapshots(config)
    num_seqs = max(_FEWEST_SEQUENCES, -(-config.num_blocks * sizes.block_size // num_tokens))
    num_seqs = min(config.max_num_seqs, config.num_blocks, num_seqs)
    step_pages = -(-config.tokens_per_step // sizes.block_size)
    num_slots = num_seqs * (1 + num_snapshots) if sizes.slot else 0
    return PoolSizes(
        num_blocks=config.num_blocks,
        num_window_pages=tuple(
            min(config.num_blocks, num_seqs * pages_in_reach(window, sizes.block_size) + step_pages)
            for window, _ in sizes.windows
        ),
        num_slots=num_slots,
        num_snapshots=snapshots_left(num_slots, num_snapshots),
    )


def _num_snapshots(config: EngineConfig) -> int:
    """Return the slots for each sequence beside its own: of snapshots, or at least of the state before a draft."""
    return max(config.state_snapshots, int(config.speculation is not None))


def blocks_that_fit(memory: int, bytes_per_block: int, max_useful: int) -> int:
    """Return the number of blocks in ``memory`` bytes, at most ``max_useful``.

    Raises:
        ConfigError: if not even one block fits.
    """
    num_blocks = min(memory // bytes_per_block, max_useful)
    if num_blocks < 1:
        raise ConfigError(
            f"{max(memory, 0) / 2**20:.1f} MiB are left for the KV cache, but one block takes "
            f"{bytes_per_block / 2**20:.1f} MiB; raise kv_cache_memory or gpu_memory_utilization, or lower "
            "max_num_batched_tokens or block_size"
        )
    return num_blocks
