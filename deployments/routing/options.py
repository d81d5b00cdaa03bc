"""RoutingOptions: the parameters of the routing policy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoutingOptions"]


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Parameters of the cost and of the router's assumptions; the defaults were tuned by benchmarks/routing."""

    miss_weight: float = 1.5  # w: the delay that a computed token causes to others, relative to its own cost
    decode_weight: float = 0.3  # beta: the weight of ReplicaLoad.decode_pressure
    load_bound: float = 1.02  # replicas that cost at most this many times the minimum are tied
    assume_s: float = 30.0  # a dispatched prompt counts as cached for this long, until an event confirms it
    stale_after_s: float = 2.0  # a load report expires after this
    transit_s: float = 0.02  # a report does not include requests dispatched less than this before it arrived
