"""ReplicaTable: the load of every replica of a deployment, with the costs and prices that follow from it.

Reports and dispatches update it; decisions only read it. It knows neither prompts nor caches, and takes no lock: the
caller holds that of RoutingState.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import xxhash

from deployments.routing.cluster_load import ClusterLoad
from deployments.routing.cost import ReplicaCost
from deployments.routing.cost_rows import CostRows
from deployments.routing.options import RoutingOptions
from deployments.routing.replica_load import ReplicaLoad
from deployments.routing.source_rates import SourceRates
from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts

__all__ = ["Replica", "ReplicaTable"]

# Speeds within this factor of the mean count as equal to it. Without this, measurement noise among equal machines would
# send all new prompts to one idle replica.
_SIMILAR = 1.3
_SPEEDS_INTERVAL_S = 0.1  # between two updates of the mean speeds


class Replica(ReplicaCost):
    """One replica: its load, its cost and whether its reports are up to date."""

    __slots__ = ("decoding", "fresh_until", "has_events", "is_fresh", "load", "name", "pending", "ranks_last", "seed")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seed = xxhash.xxh64_intdigest(name.encode())  # for rendezvous hashing
        self.load = ReplicaLoad()
        self.pending = self.decoding = 0  # answers, as its cost counts them
        self.has_events = False  # KV events confirm what it holds; without them the index is a guess
        self.fresh_until = -inf  # its last report expires then
        self.is_fresh = False  # its last report has not expired
        self.ranks_last = False  # its last report has expired, while other replicas still report


class ReplicaTable:
    """The replicas by name.

    Attributes:
        rows: the costs of all replicas, for decisions.
        cluster: how busy they are on average.
        rates: how fast they fetch KV from elsewhere.
    """

    def __init__(self, options: RoutingOptions) -> None:
        self.options = options
        self.by_name: dict[str, Replica] = {}
        self.rows = CostRows()
        self.cluster = ClusterLoad()
        self.rates = SourceRates()
        self._pending = self._decoding = self._busy = 0  # sums over the replicas; busy: those with anything pending
        self._fresh: OrderedDict[str, Replica] = OrderedDict()  # those that are, in the order in which they expire
        self._mean_rate = 1.0  # prefill tokens/s; for replicas that have not measured theirs
        self._knows_rates = False
        self._mean_costs: StepCosts | None = None  # likewise
        self._next_speeds_update = -inf

    def add(self, name: str, slot: int) -> None:
        """Add a replica that has not reported yet.

        Args:
            name: of the replica.
            slot: its number among the replicas: small, and no other one's.
        """
        replica = self.by_name[name] = Replica(name)
        self.rows.add(name, slot, replica.seed)
        self._update_cost(replica)

    def remove(self, name: str) -> None:
        """Remove a replica."""
        self._count(self.by_name.pop(name), 0, 0)
        self.rows.remove(name)
        self.rates.remove(name)
        if self._fresh.pop(name, None) is not None and not self._fresh:
            self._update_costs()

    def report(self, name: str, load: EngineLoad, now: float) -> None:
        """Apply a load report of a known replica, which arrives at ``now``."""
        replica = self.by_name[name]
        replica.load.reported(load, now=now, transit_s=self.options.transit_s)
        replica.fresh_until = now + self.options.stale_after_s
        if load.source_rates:
            self.rates.report(name, load.source_rates, now)
        if now >= self._next_speeds_update:
            self._next_speeds_update = now + _SPEEDS_INTERVAL_S
            self._update_speeds()
        is_first = not self._fresh
        replica.is_fresh, self._fresh[name] = True, replica
        self._fresh.move_to_end(name)
        if is_first:
            self._update_costs()
        else:
            self._update_cost(replica)

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

    def sample(self, now: float) -> None:
        """Bring the table up to date for a decision: expired reports, and the means over time."""
        while self._fresh and (oldest := next(iter(self._fresh.values()))).fresh_until < now:
            self._expire(oldest)
        number = len(self.by_name)
        self.cluster.sample(self._pending / number, self._decoding / number, self._busy / number, now)

    @property
    def knows_rates(self) -> bool:
        """Whether the prefill rate of a replica is known; else costs are tokens, which compare as well."""
        return self._knows_rates

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

    def _expire(self, replica: Replica) -> None:
        del self._fresh[replica.name]
        replica.is_fresh = False
        if self._fresh:
            self._update_cost(replica)
        else:
            self._update_costs()

    def _update_speeds(self) -> None:
        loads = [replica.load for replica in self.by_name.values()]
        rates = [rate for load in loads if (rate := load.prefill_rate) > 0]
        costs = [measured for load in loads if (measured := load.step_costs) is not None]
        self._mean_costs = _mean(costs) if costs else None
        # Short prompts show no rate, because the fixed cost of a step makes them look slow. But a token must not seem
        # to cost a second, or the answers in a batch would cost nothing beside it.
        if not rates and self._mean_costs is not None and self._mean_costs.prefill_token_s > 0:
            rates = [1 / self._mean_costs.prefill_token_s]
        self._knows_rates = bool(rates)
        self._mean_rate = sum(rates) / len(rates) if rates else 1.0
        self._update_costs()

    def _update_costs(self) -> None:
        for replica in self.by_name.values():
            self._update_cost(replica)

    def _update_cost(self, replica: Replica) -> None:
        load, fresh = replica.load, replica.is_fresh
        replica.ranks_last = not fresh and bool(self._fresh) and load.report is not None
        num_pending, pending_tokens = load.pending(fresh=fresh)
        num_decoding, decoding_tokens = load.decoding(fresh=fresh)
        self._count(replica, num_pending, num_decoding)
        rate, mean = load.prefill_rate, self._mean_rate
        replica.update(
            queued_tokens=load.queued_tokens(fresh=fresh),
            seconds_per_token=1 / (mean if not rate or _are_similar(rate, mean) else rate),
            num_answers=num_pending + num_decoding,
            num_context_tokens=pending_tokens + decoding_tokens,
            costs=self._costs(replica) if fresh else None,
        )
        self.rows.update(replica.name, replica, ranks_last=replica.ranks_last)

    def _costs(self, replica: Replica) -> StepCosts | None:
        """Return the costs of a replica's steps, or the mean if they are similar to it."""
        measured, mean = replica.load.step_costs, self._mean_costs
        if measured is None or mean is None:
            return mean
        # Coefficients that a fit hardly separates may differ while the steps do not.
        step = 0, *replica.load.decoding(fresh=True)
        return mean if not step[1] or _are_similar(measured.seconds(*step), mean.seconds(*step)) else measured

    def _count(self, replica: Replica, num_pending: int, num_decoding: int) -> None:
        self._pending += num_pending - replica.pending
        self._decoding += num_decoding - replica.decoding
        self._busy += (num_pending > 0) - (replica.pending > 0)
        replica.pending, replica.decoding = num_pending, num_decoding


def _are_similar(measured: float, mean: float) -> bool:
    return mean / _SIMILAR <= measured <= mean * _SIMILAR


def _mean(costs: list[StepCosts]) -> StepCosts:
    number = len(costs)
    return StepCosts(
        sum(cost.base_s for cost in costs) / number,
        sum(cost.prefill_token_s for cost in costs) / number,
        sum(cost.sequence_s for cost in costs) / number,
        sum(cost.kv_token_s for cost in costs) / number,
    )
