"""How Ray places the tensor-parallel ranks of an engine: all on one node, or each where there is room.

This module knows only options: it imports neither Ray nor torch.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from engine.config import EngineConfig
from engine.errors import ConfigError

__all__ = ["PlacementStrategy", "placement_options", "require_room", "require_valid_placement"]

PlacementStrategy: TypeAlias = Literal["STRICT_PACK", "PACK", "SPREAD"]  # as Ray's placement groups name them

_KEY = "args.replicas.placement_strategy"


def require_valid_placement(strategy: PlacementStrategy, engine: EngineConfig, cpus_per_rank: float) -> None:
    """Check ``replicas.placement_strategy`` against the options of the engine.

    Raises:
        ConfigError: there is one rank, the ranks need memory that they share, or they reserve nothing.
    """
    if strategy == "STRICT_PACK":
        return
    value = f"{_KEY}={strategy}"
    if engine.tensor_parallel_size == 1:
        raise ConfigError(f"{value} places ranks, and engine.tensor_parallel_size is 1; raise that, or leave it out")
    for name in engine.shared_memory_options:
        raise ConfigError(f"{value} may place ranks on several nodes, and engine.{name} needs one; leave one out")
    if engine.device == "cpu" and not cpus_per_rank:
        raise _empty_bundle(strategy)


def require_room(strategy: PlacementStrategy, gpus: float, gpus_of_nodes: list[float], *, autoscales: bool) -> None:
    """Check that one node has the GPUs of an engine, if it must be on one node.

    Args:
        strategy: ``replicas.placement_strategy``.
        gpus: of an engine.
        gpus_of_nodes: of the cluster's nodes; empty: not known, or none has any.
        autoscales: whether Serve changes the number of replicas. Then the cluster may add larger nodes on demand.

    Raises:
        ConfigError: no node has as many.
    """
    largest = max(gpus_of_nodes, default=0.0)
    if strategy == "STRICT_PACK" and not autoscales and 0 < largest < gpus:
        raise ConfigError(
            f"engine.tensor_parallel_size={gpus:g} exceeds the {largest:g} GPUs of the largest node; set "
            f"{_KEY} to PACK to use several nodes, or lower it"
        )


def placement_options(strategy: PlacementStrategy, num_ranks: int, cpus: float, gpus: float) -> dict[str, Any]:
    """Return Serve's options for the resources of an engine replica.

    Args:
        strategy: ``replicas.placement_strategy``.
        num_ranks: of the engine.
        cpus: of the engine, or of each rank if they have bundles of their own.
        gpus: of the engine.

    Raises:
        ConfigError: the ranks reserve nothing, because the cluster has no GPU.
    """
    if strategy == "STRICT_PACK":  # the ranks are processes of the replica
        return {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    of_rank = {"CPU": cpus, "GPU": gpus / num_ranks}
    bundle = {name: number for name, number in of_rank.items() if number}
    if not bundle:
        raise _empty_bundle(strategy)
    return {
        "ray_actor_options": {"num_cpus": of_rank["CPU"], "num_gpus": of_rank["GPU"]},
        "placement_group_bundles": [bundle] * num_ranks,
        "placement_group_strategy": strategy,
    }


def _empty_bundle(strategy: PlacementStrategy) -> ConfigError:
    return ConfigError(f"{_KEY}={strategy} reserves CPUs or GPUs for a rank; raise args.replicas.cpus_per_engine=0")
