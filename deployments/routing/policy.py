"""The routing policy: which replica should get a prompt, in plain names, hashes and numbers.

    cost = queued_prefill / P + (1 + w) * uncached / P + beta * decode_pressure        [seconds]

P is the replica's prefill rate, uncached what it would have to compute of the prompt, and the extra w what a miss costs
everyone behind it. The cheapest replica gets the prompt. Where several hold equally much of it, and cost about as
little, rendezvous hashing on the block at which the prompt leaves what is cached decides: every ingress chooses alike
without talking, and a burst of one new prompt meets on one replica. After Preble (Srivatsa et al., 2024) and LMetric
(OSDI'26), with consistent hashing under bounded loads (Mirrokni et al., 2018) for ties.

It knows nothing of Ray, of sockets or of what the time is: router.py binds it to Serve, the receivers of events and
reports feed it, a simulator drives it as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from threading import Lock

import xxhash

from deployments.routing.kv_index import KVIndex
from deployments.routing.replica_load import ReplicaLoad
from engine.observability.load import EngineLoad

__all__ = ["Decision", "RoutingOptions", "RoutingState"]

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads what differs in a few bits (Fibonacci hashing)
_MASK = 2**64 - 1
_SLICE = 4096  # blocks
_LIKE = 3.0  # prefill rates within this factor of the mean count as equal
_RATES_S = 0.1  # between two looks at everybody's prefill rates
_GUESSED_BLOCKS = 65_536  # a cache's size until it is reported


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """What may be tuned; the defaults are what benchmarks/routing found on the Mooncake conversation trace."""

    miss_weight: float = 1.5  # w: what a computed token costs others, in times of what it costs its own request
    decode_weight: float = 0.3  # beta: what a crowded batch costs, by ReplicaLoad.decode_pressure
    load_bound: float = 1.02  # replicas up to this many times the least cost count as tied
    assume_s: float = 30.0  # how long a dispatched prompt is assumed to be cached before an event says so
    stale_after_s: float = 2.0  # a load report is out of date after this
    transit_s: float = 0.02  # a report that arrives does not know of what was dispatched within this time before it


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request should go, and what was known when that was decided."""

    order: list[str]  # all candidates, best first; the avoided ones last
    outcome: str  # hit | cold | balanced | fallback | retry
    predicted_blocks: int  # that order[0] is thought to hold of this prompt
    best_blocks: int  # that any replica is thought to hold


class _Replica:
    """What the policy keeps of a replica; what a decision reads is ready to be read."""

    __slots__ = ("confirmed", "fresh", "fresh_until", "load", "queue_s", "seconds_per_token", "seed", "stale")

    def __init__(self, name: str) -> None:
        self.load = ReplicaLoad()
        self.seed = xxhash.xxh64_intdigest(name.encode())
        self.confirmed = False  # its events tell what it holds; if not, the index is a guess
        self.fresh_until = -inf  # its report counts until then
        self.fresh = False  # whether it counts now
        self.stale = False  # it has reported, but not lately, while others have
        self.seconds_per_token = 1.0  # of prefill
        self.queue_s = 0.0  # what it costs to go there with nothing to compute


class RoutingState:
    """What one ingress process knows of a deployment's replicas. Every method may be called from any thread."""

    def __init__(self, options: RoutingOptions = RoutingOptions()) -> None:
        self.options = options
        self.block_size = 16  # tokens
        self.index = KVIndex()
        self._replicas: dict[str, _Replica] = {}
        self._turns = 0
        self._rates_due = -inf
        self._typical_rate = 1.0  # prefill tokens/s of a replica that has not measured its own
        self._some_stale = False
        self._looked_until = inf  # until then who is stale can only change by a report
        self._lock = Lock()

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas that are there now."""
        with self._lock:
            return frozenset(self._replicas)

    def set_replicas(self, names: Collection[str]) -> None:
        """Take the replicas that are there now, and forget everything about those that are not."""
        with self._lock:
            for gone in self._replicas.keys() - set(names):
                del self._replicas[gone]
                self.index.remove_replica(gone)
            for name in names:
                if name not in self._replicas:
                    self._add(name)
            self._looked_until = -inf

    def _add(self, name: str) -> None:
        self._replicas[name] = _Replica(name)
        self._update(self._replicas[name])
        self.index.add_replica(name)

    # --- decisions -------------------------------------------------------------------------------------------------

    def choose(
        self,
        candidates: Sequence[str],
        hashes: Sequence[int],
        num_tokens: int,
        *,
        now: float,
        avoid: Collection[str] = (),
    ) -> Decision:
        """Order ``candidates`` (one at least) for a prompt of ``num_tokens`` whose full blocks have ``hashes``."""
        with self._lock:
            if not self._replicas.keys() >= set(candidates):  # Serve offers one before it says that it is there
                for name in set(candidates).difference(self._replicas):
                    self._add(name)
            if now > self._looked_until:
                self._look_for_stale(now)
            depths = self.index.depths(hashes)
            best = max(depths.values(), default=0)
            costs = self._costs(candidates, depths, num_tokens)
            self._turns = turn = (self._turns + 1) % len(candidates)
            order = sorted((*candidates[turn:], *candidates[:turn]), key=costs.__getitem__)
            tiers = self._tiers(candidates, avoid)
            if tiers:
                order.sort(key=tiers.__getitem__)
            if hashes:
                leaving = hashes[min(best, len(hashes) - 1)]
                preferred = self._preferred(self._tied(order, costs, depths, tiers), leaving)
                order.remove(preferred)
                order.insert(0, preferred)
        predicted = depths.get(order[0], 0)
        outcome = "fallback" if not hashes else "cold" if not best else "hit" if predicted == best else "balanced"
        return Decision(order, "retry" if avoid else outcome, predicted, best)

    def _costs(self, candidates: Sequence[str], depths: Mapping[str, int], num_tokens: int) -> dict[str, float]:
        """Return what it costs to send a prompt to each candidate, in seconds."""
        replicas, weight = self._replicas, 1 + self.options.miss_weight
        weighted = weight * max(1, num_tokens)
        if not depths:
            return {name: (one := replicas[name]).queue_s + one.seconds_per_token * weighted for name in candidates}
        # The last token is computed even if its block is cached: its logits are needed.
        most, per_block, depth_of = weight * max(0, num_tokens - 1), weight * self.block_size, depths.get
        costs = {}
        for name in candidates:
            one = replicas[name]
            cached = depth_of(name, 0) * per_block
            costs[name] = one.queue_s + one.seconds_per_token * (weighted - (cached if cached < most else most))
        return costs

    def _tiers(self, candidates: Sequence[str], avoid: Collection[str]) -> dict[str, int]:
        """Return 0 for the usual candidates, 1 for the stale, 2 for the avoided; nothing if all are usual."""
        if not avoid and not self._some_stale:
            return {}
        return {name: 2 if name in avoid else int(self._replicas[name].stale) for name in candidates}

    def _tied(
        self, order: Sequence[str], costs: Mapping[str, float], depths: Mapping[str, int], tiers: Mapping[str, int]
    ) -> list[str]:
        """Return those that are about as cheap as the first and hold as much of the prompt."""
        first = order[0]
        limit, depth, tier = costs[first] * self.options.load_bound, depths.get(first), tiers.get(first)
        if len(order) > 1 and costs[order[1]] > limit:
            return [first]
        tied = []
        for name in order:
            if costs[name] > limit or tiers.get(name) != tier:
                break
            if depths.get(name) == depth:
                tied.append(name)
        return tied

    def _preferred(self, tied: Sequence[str], leaving: int) -> str:
        """Return rendezvous hashing's choice for the block at which the prompt leaves what is cached."""
        replicas = self._replicas
        return max(tied, key=lambda name: (leaving ^ replicas[name].seed) * _MIX & _MASK)

    def _look_for_stale(self, now: float) -> None:
        """See whose reports count, which can change without a report, and when that will change at the earliest."""
        replicas = self._replicas.values()
        for replica in replicas:
            replica.fresh = now <= replica.fresh_until
        some_fresh = any(replica.fresh for replica in replicas)
        for replica in replicas:
            replica.stale = some_fresh and not replica.fresh and replica.load.report is not None
            self._update(replica)
        self._some_stale = any(replica.stale for replica in replicas)
        self._looked_until = min((replica.fresh_until for replica in replicas if replica.fresh), default=inf)

    def _look_at_rates(self) -> None:
        """Take the mean of the measured prefill rates, for those that have not measured theirs and those near it."""
        rates = [rate for replica in self._replicas.values() if (rate := replica.load.prefill_rate) > 0]
        self._typical_rate = sum(rates) / len(rates) if rates else 1.0
        for replica in self._replicas.values():
            self._update(replica)

    def _update(self, replica: _Replica) -> None:
        """Bring up to date what decisions read of a replica, after its load has changed."""
        rate, typical = replica.load.prefill_rate, self._typical_rate
        # Else what is noise among like machines would send every new prompt to one of them, idle as they all are.
        is_like_others = not rate or typical / _LIKE <= rate <= typical * _LIKE
        replica.seconds_per_token = 1 / (typical if is_like_others else rate)
        queued = replica.load.queued_tokens(fresh=replica.fresh)
        pressure = replica.load.decode_pressure(fresh=replica.fresh)
        replica.queue_s = queued * replica.seconds_per_token + self.options.decode_weight * pressure

    def dispatched(
        self, replica: str, hashes: Sequence[int], num_tokens: int, *, now: float, request_id: str = ""
    ) -> int:
        """Count a request in, and assume that the replica will hold its blocks.

        Returns:
            How many of them it was thought to hold before.
        """
        with self._lock:
            self.index.expire(now)
            if (known := self._replicas.get(replica)) is None:
                return 0  # it has gone meanwhile
            depth = self.index.depth(replica, hashes)
            known.load.dispatched(request_id, max(1, num_tokens - depth * self.block_size), now)
            self._update(known)
            self._assume(replica, hashes, now)
        return depth

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        """Take a replica's word that a request which needs ``hashes`` has joined its queue, whoever sent it.

        For a burst of one new prompt that comes through many ingresses: without it, each learns of the others'
        requests only as a longer queue, and of their blocks when they are computed.
        """
        with self._lock:
            self._assume(replica, hashes, now)

    def _assume(self, replica: str, hashes: Sequence[int], now: float) -> None:
        known = self._replicas.get(replica)
        if known is None:
            return
        self.index.assume(replica, hashes, now + self.options.assume_s if known.confirmed else inf)
        if not known.confirmed:
            report = known.load.report
            self.index.trim(replica, report.num_blocks if report is not None else _GUESSED_BLOCKS)

    def completed(self, replica: str, request_id: str = "") -> None:
        """Count a request out: it has ended, however. Without an id it is the oldest one."""
        with self._lock:
            if (known := self._replicas.get(replica)) is not None:
                known.load.completed(request_id)
                self._update(known)

    # --- what replicas tell ----------------------------------------------------------------------------------------

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Take a replica's word that it holds ``hashes``."""
        with self._lock:
            self.index.stored(replica, hashes)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Take a replica's word that it has evicted ``hashes``."""
        with self._lock:
            self.index.removed(replica, hashes)

    def cleared(self, replica: str) -> None:
        """Take a replica's word that it holds nothing: it was reset or restarted."""
        with self._lock:
            self.index.cleared(replica)
            self._confirm(replica)

    def replaced(self, replica: str, hashes: Iterable[int]) -> None:
        """Take a snapshot of what a replica holds; from here its events tell.

        In slices, between which decisions are made: a million blocks take a quarter of a second.
        """
        held = list(hashes)
        with self._lock:
            self._confirm(replica)
            gone = list(self.index.blocks(replica).difference(held))
        for change, blocks in ((self.index.removed, gone), (self.index.stored, held)):
            for start in range(0, len(blocks), _SLICE):
                with self._lock:
                    change(replica, blocks[start : start + _SLICE])

    def _confirm(self, replica: str) -> None:
        known = self._replicas.get(replica)
        if known is not None and not known.confirmed:
            known.confirmed = True
            self.index.trim(replica, 0)  # what was a guess without an end

    def lost(self, replica: str) -> None:
        """From here a replica's events are missing: guess that it is an LRU cache, until a snapshot comes."""
        with self._lock:
            if (known := self._replicas.get(replica)) is not None:
                known.confirmed = False
                self.index.doubt(replica)

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        """Take a replica's load report, which arrives now."""
        with self._lock:
            self.index.expire(now)
            if (known := self._replicas.get(replica)) is None:
                return
            known.load.reported(load, now=now, transit_s=self.options.transit_s)
            known.fresh_until = now + self.options.stale_after_s
            if now >= self._rates_due:
                self._rates_due = now + _RATES_S
                self._look_at_rates()
            if known.fresh:
                self._update(known)
            else:
                self._look_for_stale(now)

    # --- what others ask -------------------------------------------------------------------------------------------

    def total_load(self, *, now: float) -> tuple[int, int]:
        """Return the waiting requests and the queued prefill tokens of all replicas, our unreported ones included."""
        with self._lock:
            loads = [(replica.load, now <= replica.fresh_until) for replica in self._replicas.values()]
            return (
                sum(load.waiting_requests(fresh=fresh) for load, fresh in loads),
                sum(load.queued_tokens(fresh=fresh) for load, fresh in loads),
            )

    def is_busy(self, replica: str, *, now: float, within_s: float) -> bool:
        """Whether a replica is alive, has ended a step within the last ``within_s`` seconds, and has work queued.

        Then a request may be silent there with good reason.
        """
        with self._lock:
            known = self._replicas.get(replica)
            if known is None or known.load.report is None or now > known.fresh_until:
                return False
            report = known.load.report
            moving = known.load.moved_since(now - within_s)
            return moving and (report.num_waiting > 0 or report.queued_prefill_tokens > 0)
