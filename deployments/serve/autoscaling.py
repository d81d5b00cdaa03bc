"""KVPressure: the autoscaling policy. It computes the number of engine replicas from their queues and KV usage.

Serve calls it in its controller with the metrics that each replica reports (``replica_pressure``), and applies the
bounds, factors and delays of the deployment's autoscaling_config to the result. Serve's default metric, the number of
requests, does not distinguish ten tokens from a hundred thousand. The module knows no engine and no clock. Serve
pickles this module by value, so it imports nothing of this project.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["KVPressure", "replica_pressure"]

QUEUED_PREFILL_S = "queued_prefill_s"
KV_USAGE = "kv_usage"
NUM_REQUESTS = "num_requests"
UNMEASURED_TOKENS_PER_S = 1000.0  # assumed before a replica's first prefill: slow enough that a queue counts


class Load(Protocol):
    """The fields of ``EngineLoad`` that are used here."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def queued_prefill_tokens(self) -> int: ...
    @property
    def prefill_tokens_per_s(self) -> float: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...


class Context(Protocol):
    """The fields of Serve's ``AutoscalingContext`` that are used here."""

    current_num_replicas: int

    @property
    def aggregated_metrics(self) -> dict[str, dict[Any, float]] | None: ...
    @property
    def total_num_requests(self) -> float: ...


def replica_pressure(load: Load) -> dict[str, float]:
    """Return a replica's metrics: seconds of queued prefill, used share of its KV blocks, unfinished requests."""
    rate = load.prefill_tokens_per_s or UNMEASURED_TOKENS_PER_S
    used = load.num_blocks - load.num_free_blocks
    return {
        QUEUED_PREFILL_S: load.queued_prefill_tokens / rate,
        KV_USAGE: used / max(load.num_blocks, 1),
        NUM_REQUESTS: load.num_running + load.num_waiting,
    }


class KVPressure:
    """Keeps the mean replica at ``target_queued_prefill_s`` of queue and ``target_kv_usage`` of KV usage.

    Args:
        target_queued_prefill_s: seconds of prefill queued before a new prompt; with more, replicas are added.
        target_kv_usage: used share of the KV blocks, 0 to 1; with more, preemptions are likely.
    """

    def __init__(self, target_queued_prefill_s: float = 1.0, target_kv_usage: float = 0.8) -> None:
        self.target_queued_prefill_s = target_queued_prefill_s
        self.target_kv_usage = target_kv_usage

    def __call__(self, ctx: Context) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, before bounds and delays, and an empty state.

        It is zero only while no replica has a request and no call of Serve's handle is waiting: an ingress whose
        requests wait for a first replica makes such a call.
        """
        metrics = ctx.aggregated_metrics or {}
        pressure = max(
            _mean(metrics.get(QUEUED_PREFILL_S)) / self.target_queued_prefill_s,
            _mean(metrics.get(KV_USAGE)) / self.target_kv_usage,
        )
        is_idle = not ctx.total_num_requests and not any((metrics.get(NUM_REQUESTS) or {}).values())
        least = 0 if is_idle else 1
        return max(least, ctx.current_num_replicas * pressure), {}


def _mean(values: dict[Any, float] | None) -> float:
    return sum(values.values()) / len(values) if values else 0.0
