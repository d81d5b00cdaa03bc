"""How many GPUs Ray reserves for an engine replica, and when several replicas may share one.

Ray counts GPUs and makes the reserved ones visible; it limits no memory. An engine that sizes its KV cache by measuring
takes ``gpu_memory_utilization`` of the whole GPU, less what other processes use at that moment. So engines share a GPU
only if the size of their KV caches is configured. This module knows only options: it imports neither Ray nor torch.
"""

from __future__ import annotations

import math

from engine.config import EngineConfig
from engine.errors import ConfigError

__all__ = ["default_gpus_per_engine", "require_valid_gpus_per_engine"]

_UNITS_PER_GPU = 10_000  # Ray's smallest share of a GPU is 0.0001


def require_valid_gpus_per_engine(gpus: float | None, engine: EngineConfig) -> None:
    """Check ``replicas.gpus_per_engine`` against the options of the engine.

    Args:
        gpus: the configured number, at least 0; None: it is not configured.
        engine: the options of each engine replica.

    Raises:
        ConfigError: the engine cannot run on that many GPUs, would leave some unused, or would share a GPU without a
            configured size of its KV cache.
    """
    if gpus is None:
        return
    value = f"args.replicas.gpus_per_engine={gpus:g}"
    ranks = engine.tensor_parallel_size
    if gpus == 0:
        if engine.device.startswith("cuda"):  # Ray would not hide the GPUs, and every engine would take the first one
            raise ConfigError(f"{value} reserves no GPU for engine.device='{engine.device}'; leave it out")
        return
    if engine.device == "cpu":
        raise ConfigError(f"{value} reserves GPUs that engine.device='cpu' does not use; leave it out")
    if gpus != ranks and (gpus > 1 or ranks > 1):
        share = ", or to less than 1 to share a GPU" if ranks == 1 else ": each rank needs a whole GPU"
        raise ConfigError(f"{value} must equal engine.tensor_parallel_size={ranks}; set it to {ranks}{share}")
    if int(gpus * _UNITS_PER_GPU) == 0:
        raise ConfigError(f"{value} is less than Ray's smallest share of a GPU; set it to at least 0.0001")
    if gpus < 1 and not _has_configured_cache(engine):
        raise ConfigError(
            f"{value} lets engines share a GPU, but engine.gpu_memory_utilization counts the memory of all its "
            "processes; set engine.kv_cache_memory, the KV cache of one engine, or set gpus_per_engine to 1"
        )


def default_gpus_per_engine(engine: EngineConfig, num_engines: int, available: float, *, autoscales: bool) -> float:
    """Return the number of GPUs for one engine if ``replicas.gpus_per_engine`` is not configured.

    It is a GPU for each tensor-parallel rank, or a share of one if the cluster has too few GPUs, or 0 on CPUs.

    Args:
        engine: the options of each engine replica.
        num_engines: number of engine replicas at the start.
        available: number of GPUs in the cluster.
        autoscales: whether Serve changes the number of replicas. Then the cluster adds missing nodes on demand.

    Raises:
        ConfigError: the cluster has too few GPUs, and engines cannot share them.
    """
    if engine.device == "cpu" or (engine.device == "auto" and available == 0):
        return 0.0
    ranks = engine.tensor_parallel_size
    needed = num_engines * ranks
    if available == 0 or available >= needed or autoscales:
        return float(ranks)
    shortage = f"replicas.num_engine_replicas={num_engines} need {needed} GPUs and the cluster has {available:g}"
    if ranks > 1:
        raise ConfigError(f"{shortage}; lower it or engine.tensor_parallel_size={ranks}: each rank needs a whole GPU")
    if not _has_configured_cache(engine):
        raise ConfigError(f"{shortage}; lower it, or let replicas share a GPU by setting engine.kv_cache_memory")
    share = int(_UNITS_PER_GPU / math.ceil(needed / available)) / _UNITS_PER_GPU  # of the GPU with the most replicas
    if share == 0.0:
        raise ConfigError(
            f"replicas.num_engine_replicas={num_engines} are more than {available:g} GPUs can be shared by; lower it"
        )
    return share


def _has_configured_cache(engine: EngineConfig) -> bool:
    """Return whether the KV cache has a configured size, instead of one measured on a GPU of its own."""
    return engine.kv_cache_memory is not None or engine.num_blocks is not None
