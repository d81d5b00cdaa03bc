"""KVPressure: how many engine replicas there should be, from how full and how far behind the ones there are.

Serve calls it in its controller with what each replica has said of itself (``replica_pressure``), and applies the
bounds, factors and delays of the deployment's autoscaling_config to the answer. Counting requests, as Serve does by
default, cannot tell a request of ten tokens from one of a hundred thousand. It knows no engine and no clock; Serve
pickles this module by value, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["KVPressure", "replica_pressure"]

QUEUED_PREFILL_S = "queued_prefill_s"
KV_USAGE = "kv_usage"
UNMEASURED_TOKENS_PER_S = 1000.0  # before a replica has seen a prefill: slow enough to notice a queue


class Load(Protocol):
    """What is read of an ``EngineLoad``."""

    @property
    def queued_prefill_tokens(self) -> int: ...
    @property
    def prefill_tokens_per_s(self) -> float: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...


class Context(Protocol):
    """What is read of Serve's ``AutoscalingContext``."""

    current_num_replicas: int

    @property
    def aggregated_metrics(self) -> dict[str, dict[Any, float]] | None: ...
    @property
    def total_num_requests(self) -> float: ...


def replica_pressure(load: Load) -> dict[str, float]:
    """Return what a replica publishes: seconds of prefill that are queued, and the share of KV blocks in use."""
    rate = load.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S
    used = load.num_blocks - load.num_free_blocks
    return {QUEUED_PREFILL_S: load.queued_prefill_tokens / rate, KV_USAGE: used / max(load.num_blocks, 1)}


class KVPressure:
    """Aims at a queue of ``target_queued_prefill_s`` and a KV usage of ``target_kv_usage`` on the mean replica.

    Args:
        target_queued_prefill_s: seconds that a new prompt may wait for those before it; more asks for more replicas.
        target_kv_usage: share of the KV blocks, 0 to 1, that sequences may use; beyond it preemption is near.
    """

    def __init__(self, target_queued_prefill_s: float = 1.0, target_kv_usage: float = 0.8) -> None:
        self.target_queued_prefill_s = target_queued_prefill_s
        self.target_kv_usage = target_kv_usage

    def __call__(self, ctx: Context) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas wanted, before bounds and delays, and no state.

        None are wanted only where nothing is being served; the first request then brings back one.
        """
        metrics = ctx.aggregated_metrics or {}
        pressure = max(
            _mean(metrics.get(QUEUED_PREFILL_S)) / self.target_queued_prefill_s,
            _mean(metrics.get(KV_USAGE)) / self.target_kv_usage,
        )
        least = 1 if ctx.total_num_requests > 0 else 0
        return max(least, ctx.current_num_replicas * pressure), {}


def _mean(values: dict[Any, float] | None) -> float:
    return sum(values.values()) / len(values) if values else 0.0
