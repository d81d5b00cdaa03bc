"""RoutingState: the caches and loads of a deployment's replicas, and the routing decisions based on them.

    KV events, snapshots --> KVIndex       which replica holds which blocks
    load reports         --> ReplicaTable  how busy each replica is
    dispatches, ends     --> both
                               RoutingPolicy.choose reads both

It adds a lock, so that the event subscriber's thread and the requests may call it at the same time. It knows neither
Ray nor sockets nor what the time is; the simulator in benchmarks/routing drives it unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from threading import Lock

from deployments.routing.cost import PromptBlocks
from deployments.routing.kv_index import KVIndex
from deployments.routing.options import RoutingOptions
from deployments.routing.policy import Decision, RoutingPolicy
from deployments.routing.replica_table import ReplicaTable
from engine.observability.load import EngineLoad

__all__ = ["RoutingState"]

_DEFAULTS = RoutingOptions()
_SLICE = 4096  # blocks of a snapshot that are applied under one hold of the lock
_DEFAULT_CACHE_BLOCKS = 65_536  # assumed size of a replica's KV cache until it reports it


class RoutingState:
    """The replicas' caches and loads. Every method may be called from any thread; times are monotonic seconds."""

    def __init__(self, options: RoutingOptions = _DEFAULTS) -> None:
        self.block_size = 16  # tokens
        self.index = KVIndex()
        self._table = ReplicaTable(options)
        self._policy = RoutingPolicy(self._table)
        self._lock = Lock()

    @property
    def options(self) -> RoutingOptions:
        """The parameters of the policy."""
        return self._table.options

    @options.setter
    def options(self, options: RoutingOptions) -> None:
        self._table.options = options

    @property
    def replicas(self) -> frozenset[str]:
        """The names of the known replicas."""
        with self._lock:
            return frozenset(self._table.by_name)

    def set_replicas(self, names: Collection[str]) -> None:
        """Replace the set of replicas; forget everything about those that are gone."""
        with self._lock:
            for gone in self._table.by_name.keys() - set(names):
                self._table.remove(gone)
                self.index.remove_replica(gone)
            self._add_unknown(names)

    def _add_unknown(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._table.by_name:
                self._table.add(name)
                self.index.add_replica(name)

    # --- requests --------------------------------------------------------------------------------------------------

    def choose(
        self,
        candidates: Sequence[str],
        hashes: Sequence[int],
        num_tokens: int,
        *,
        now: float,
        avoid: Collection[str] = (),
    ) -> Decision:
        """Rank ``candidates``, at least one, for a prompt of ``num_tokens`` whose full blocks have ``hashes``."""
        with self._lock:
            if not self._table.by_name.keys() >= set(candidates):  # Serve may offer a replica before it lists it
                self._add_unknown(candidates)
            self._table.expire_reports(now)
            num_cached_blocks = self.index.num_cached_blocks(hashes)
            return self._policy.choose(
                candidates, PromptBlocks(num_tokens, hashes, self.block_size), num_cached_blocks, avoid
            )

    def dispatched(
        self, replica: str, hashes: Sequence[int], num_tokens: int, *, now: float, request_id: str = ""
    ) -> int:
        """Add a request to a replica's load, and assume that the replica will hold its blocks.

        Returns:
            How many leading blocks of the prompt the replica was predicted to have cached already.
        """
        with self._lock:
            self.index.expire(now)
            if replica not in self._table.by_name:
                return 0
            num_cached = self.index.num_cached_blocks_on(replica, hashes)
            self._table.dispatched(replica, request_id, max(1, num_tokens - num_cached * self.block_size), now)
            self._assume(replica, hashes, now)
        return num_cached

    def ended(self, replica: str, request_id: str = "") -> None:
        """Remove a request that has ended, for any reason, from a replica's load; without an id, its oldest one."""
        with self._lock:
            if replica in self._table.by_name:
                self._table.ended(replica, request_id)

    def total_queued(self, *, now: float) -> tuple[int, int]:
        """Return (waiting requests, queued prefill tokens) of all replicas, unreported dispatches included."""
        with self._lock:
            return self._table.total_queued(now)

    def is_busy(self, replica: str, *, now: float, within_s: float, needs_queue: bool = True) -> bool:
        """Return whether a replica reports, has finished a step within ``within_s`` seconds, and has a queue.

        A request that gets no token from such a replica is waiting its turn; the replica is not stuck. Nor is it if a
        request gets its tokens together at the end; then the replica need not have a queue.
        """
        with self._lock:
            return self._table.is_busy(replica, now, within_s, needs_queue=needs_queue)

    # --- messages from replicas: the interface of wire.feed.Listener; unknown replicas are ignored -------------------

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica holds ``hashes``."""
        with self._lock:
            self.index.stored(replica, hashes)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica has evicted ``hashes``."""
        with self._lock:
            self.index.removed(replica, hashes)

    def cleared(self, replica: str) -> None:
        """Record that a replica holds nothing: its cache was reset or its engine restarted."""
        with self._lock:
            self.index.cleared(replica)
            self._confirm(replica)

    def replaced(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica holds exactly ``hashes``: a snapshot, which later events continue.

        Applied in slices, with decisions in between: a million blocks take a quarter of a second.
        """
        held = list(hashes)
        with self._lock:
            self._confirm(replica)
            gone = list(self.index.blocks(replica).difference(held))
        for change, blocks in ((self.index.removed, gone), (self.index.stored, held)):
            for start in range(0, len(blocks), _SLICE):
                with self._lock:
                    change(replica, blocks[start : start + _SLICE])

    def events_lost(self, replica: str) -> None:
        """Record that a replica's events are missing: until a snapshot comes, model its cache as an LRU cache."""
        with self._lock:
            if (known := self._table.by_name.get(replica)) is not None:
                known.has_events = False
                self.index.mark_unconfirmed(replica)

    def awaited(self, replica: str, hashes: Sequence[int], *, now: float) -> None:
        """Assume that a replica will hold ``hashes``: a request that needs them has joined its queue.

        Replicas announce the requests of all ingresses, so that a burst of one new prompt through many ingresses lands
        on one replica. Without the announcement an ingress would see the blocks only once they are computed.
        """
        with self._lock:
            self._assume(replica, hashes, now)

    def report(self, replica: str, load: EngineLoad, *, now: float) -> None:
        """Apply a replica's load report, which arrives at ``now``."""
        with self._lock:
            self.index.expire(now)
            if replica in self._table.by_name:
                self._table.report(replica, load, now)

    def _assume(self, replica: str, hashes: Sequence[int], now: float) -> None:
        if (known := self._table.by_name.get(replica)) is None:
            return
        self.index.assume(replica, hashes, now + self.options.assume_s if known.has_events else inf)
        if not known.has_events:
            report = known.load.report
            self.index.trim(replica, report.num_blocks if report is not None else _DEFAULT_CACHE_BLOCKS)

    def _confirm(self, replica: str) -> None:
        """End the LRU model of a replica's cache: from now on its events say what it holds."""
        known = self._table.by_name.get(replica)
        if known is not None and not known.has_events:
            known.has_events = True
            self.index.trim(replica, 0)
