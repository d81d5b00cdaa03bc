"""ReplicaTable: the load of every replica of a deployment, with the cost that follows from it.

Reports and dispatches update it; decisions only read it. It knows neither prompts nor caches, and takes no lock: the
caller holds that of RoutingState.
"""

from __future__ import annotations

from math import inf

import xxhash

from deployments.routing.cost import ReplicaCost
from deployments.routing.options import RoutingOptions
from deployments.routing.replica_load import ReplicaLoad
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad

__all__ = ["Replica", "ReplicaTable"]

_SIMILAR_RATE = 3.0  # prefill rates within this factor of the mean count as equal to it
_RATES_INTERVAL_S = 0.1  # between two updates of the mean prefill rate


class Replica(ReplicaCost):
    """One replica: its load, its cost and whether its reports are up to date."""

    __slots__ = ("fresh_until", "has_events", "is_fresh", "load", "ranks_last", "seed")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.seed = xxhash.xxh64_intdigest(name.encode())  # for rendezvous hashing
        self.load = ReplicaLoad()
        self.has_events = False  # KV events confirm what it holds; without them the index is a guess
        self.fresh_until = -inf  # its last report expires then
        self.is_fresh = False  # its last report has not expired
        self.ranks_last = False  # its last report has expired, while other replicas still report


class ReplicaTable:
    """The replicas by name."""

    def __init__(self, options: RoutingOptions) -> None:
        self.options = options
        self.by_name: dict[str, Replica] = {}
        self.any_ranks_last = False
        self._fresh_until = inf  # no report expires before then
        self._mean_rate = 1.0  # prefill tokens/s; for replicas that have not measured theirs
        self._next_rates_update = -inf

    def add(self, name: str) -> None:
        """Add a replica that has not reported yet."""
        self.by_name[name] = Replica(name)
        self._update_cost(self.by_name[name])
        self._fresh_until = -inf

    def remove(self, name: str) -> None:
        """Remove a replica."""
        del self.by_name[name]
        self._fresh_until = -inf

    def report(self, name: str, load: EngineLoad, now: float) -> None:
        """Apply a load report of a known replica, which arrives at ``now``."""
        replica = self.by_name[name]
        replica.load.reported(load, now=now, transit_s=self.options.transit_s)
        replica.fresh_until = now + self.options.stale_after_s
        if now >= self._next_rates_update:
            self._next_rates_update = now + _RATES_INTERVAL_S
            self._update_rates()
        if replica.is_fresh:
            self._update_cost(replica)
        else:
            self._update_freshness(now)

    def sent(self, dispatch: Dispatch) -> None:
        """Add a dispatch to the load of its replica, which is known."""
        replica = self.by_name[dispatch.replica]
        replica.load.sent(dispatch)
        self._update_cost(replica)

    def ended(self, dispatch: Dispatch) -> None:
        """Remove a dispatch from the load of its replica, which is known."""
        replica = self.by_name[dispatch.replica]
        replica.load.ended(dispatch)
        self._update_cost(replica)

    def expire_reports(self, now: float) -> None:
        """Recompute which replicas rank last, if a report may have expired since the last call."""
        if now > self._fresh_until:
            self._update_freshness(now)

    def total_queued(self, now: float) -> tuple[int, int]:
        """Return (waiting requests, queued prefill tokens) of all replicas, unreported dispatches included."""
        loads = [(replica.load, now <= replica.fresh_until) for replica in self.by_name.values()]
        return (
            sum(load.waiting_requests(fresh=fresh) for load, fresh in loads),
            sum(load.queued_tokens(fresh=fresh) for load, fresh in loads),
        )

    def is_busy(self, name: str, now: float, within_s: float, *, needs_queue: bool = True) -> bool:
        """Return whether a replica reports, has finished a step within ``within_s`` seconds, and has a queue.

        Without ``needs_queue`` it need not have one.
        """
        replica = self.by_name.get(name)
        if replica is None or replica.load.report is None or now > replica.fresh_until:
            return False
        report = replica.load.report
        has_queue = report.num_waiting > 0 or report.queued_prefill_tokens > 0
        return (has_queue or not needs_queue) and replica.load.has_stepped_since(now - within_s)

    def _update_freshness(self, now: float) -> None:
        replicas = self.by_name.values()
        for replica in replicas:
            replica.is_fresh = now <= replica.fresh_until
        any_is_fresh = any(replica.is_fresh for replica in replicas)
        for replica in replicas:
            replica.ranks_last = any_is_fresh and not replica.is_fresh and replica.load.report is not None
            self._update_cost(replica)
        self.any_ranks_last = any(replica.ranks_last for replica in replicas)
        self._fresh_until = min((replica.fresh_until for replica in replicas if replica.is_fresh), default=inf)

    def _update_rates(self) -> None:
        rates = [rate for replica in self.by_name.values() if (rate := replica.load.prefill_rate) > 0]
        self._mean_rate = sum(rates) / len(rates) if rates else 1.0
        for replica in self.by_name.values():
            self._update_cost(replica)

    def _update_cost(self, replica: Replica) -> None:
        rate, mean = replica.load.prefill_rate, self._mean_rate
        # Without this, measurement noise among equal machines would send all new prompts to one idle replica.
        is_similar = not rate or mean / _SIMILAR_RATE <= rate <= mean * _SIMILAR_RATE
        replica.update(
            queued_tokens=replica.load.queued_tokens(fresh=replica.is_fresh),
            seconds_per_token=1 / (mean if is_similar else rate),
            decode_pressure=replica.load.decode_pressure(fresh=replica.is_fresh),
            decode_weight=self.options.decode_weight,
        )
