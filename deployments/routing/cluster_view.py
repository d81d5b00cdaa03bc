"""ClusterView: the replicas that Serve lists, and the replica at which each request of this process runs.

Serve's router, the thread that receives KV events, and the requests of this process share it. ``routing`` holds the
replicas' caches and loads, and ranks the replicas. It knows neither Serve nor HTTP. Every method may be called from any
thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from deployments.observability.ingress_metrics import (
    KV_INDEX_BLOCKS,
    REPLICAS,
    ROUTING_BEST_HIT_TOKENS,
    ROUTING_PREDICTED_HIT_TOKENS,
    ingress_recorder,
)
from deployments.routing.policy import Decision
from deployments.routing.recently_routed import RecentlyRouted, RoutedRequest
from deployments.routing.state import RoutingState
from deployments.transport.kv_events.subscriber import KVEventSubscriber
from deployments.transport.replica_metadata import BLOCK_SIZE, ENDPOINT

__all__ = ["ClusterView", "cluster_view"]


class ClusterView:
    """The replicas of one deployment, and the requests that this process has sent to them."""

    def __init__(self) -> None:
        self.routing = RoutingState()
        self._recorder = ingress_recorder()
        self._subscriber: KVEventSubscriber | None = None
        self._lock = threading.Lock()
        self._replica_of: dict[str, str] = {}  # by request id; "" until the request is dispatched
        self._num_unassigned = 0  # of those, not dispatched
        self._dispatched_at: dict[str, float] = {}  # by request id
        self._without_stream: set[str] = set()  # requests whose tokens come together at the end
        self._recently_routed = RecentlyRouted()
        self._listed: dict[str, Mapping[str, Any]] = {}  # metadata of the replicas that take requests
        self._observed: dict[str, Mapping[str, Any]] = {}  # of those, and of draining ones that still run our requests
        self._watcher: Callable[[Mapping[str, Mapping[str, Any]]], None] = lambda metadata: None

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas that take requests."""
        return frozenset(self._listed)

    @property
    def num_unassigned(self) -> int:
        """The number of requests without a replica yet, for instance because there is none."""
        return self._num_unassigned

    # --- for the router and the dispatcher ----------------------------------------------------------------------------

    def set_replicas(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the set of replicas that take requests: name -> the metadata that the replica reported.

        A replica that is no longer listed but still runs requests of this process stays observed until they end, so
        that a hang is noticed while it drains. The others are forgotten.
        """
        with self._lock:
            self._listed = dict(metadata)
            for described in metadata.values():
                self.routing.block_size = described.get(BLOCK_SIZE, self.routing.block_size)
            self._update_observed()
            self._watcher(self._listed)

    def watch(self, watcher: Callable[[Mapping[str, Mapping[str, Any]]], None]) -> None:
        """Call ``watcher`` with the replicas that take requests, now and whenever they change, in any thread.

        It replaces the watcher before it.
        """
        with self._lock:
            self._watcher = watcher
            watcher(self._listed)

    def _update_observed(self) -> None:
        in_use = set(self._replica_of.values())
        draining = {
            name: described for name, described in self._observed.items() if name in in_use and name not in self._listed
        }
        self._observed = self._listed | draining
        self.routing.set_replicas(self._observed)
        endpoints = {name: described[ENDPOINT] for name, described in self._observed.items() if ENDPOINT in described}
        if self._subscriber is None and endpoints:
            self._subscriber = KVEventSubscriber(self.routing, self._recorder)
        if self._subscriber is not None:
            self._subscriber.set_endpoints(endpoints)

    def choose(
        self,
        candidates: Sequence[str],
        hashes: Sequence[int],
        num_tokens: int,
        avoid: Collection[str],
        request_id: str = "",
    ) -> Decision:
        """Rank the candidates for a prompt, and count the cache hits that are predicted for the first of them."""
        decision = self.routing.choose(candidates, hashes, num_tokens, now=time.monotonic(), avoid=avoid)
        with self._lock:
            if request_id in self._replica_of:
                self._recently_routed.record_decision(request_id, decision)
        for metric, num_blocks in (
            (ROUTING_PREDICTED_HIT_TOKENS, decision.num_cached_blocks),
            (ROUTING_BEST_HIT_TOKENS, decision.max_cached_blocks),
        ):
            if num_blocks:
                self._recorder.increment(metric, num_blocks * self.routing.block_size)
        return decision

    def dispatch(self, request_id: str, replica: str, hashes: Sequence[int], num_tokens: int) -> None:
        """Record that a request is sent to ``replica``, for the first time or after another replica rejected it."""
        with self._lock:  # for the whole method: else `end` could run between the look-up and the bookkeeping
            if request_id not in self._replica_of:  # its client has disconnected meanwhile
                return
            before, now = self._replica_of[request_id], time.monotonic()
            self._replica_of[request_id], self._dispatched_at[request_id] = replica, now
            if before:
                self.routing.ended(before, request_id)
            else:
                self._num_unassigned -= 1
            num_cached = self.routing.dispatched(replica, hashes, num_tokens, now=now, request_id=request_id)
            self._recently_routed.record_dispatch(request_id, replica, num_tokens, num_cached, self.routing.block_size)

    def unassign(self, request_id: str) -> None:
        """Record that the replica of a request has returned it; it waits for another one."""
        with self._lock:
            if before := self._replica_of.get(request_id, ""):
                self._replica_of[request_id] = ""
                self._num_unassigned += 1
                self.routing.ended(before, request_id)

    # --- for the requests -----------------------------------------------------------------------------------------

    def begin(self, request_id: str, *, streams: bool = True) -> None:
        """Add a request that has no replica yet; without ``streams``, its tokens come together at the end."""
        with self._lock:
            self._replica_of[request_id] = ""
            if not streams:
                self._without_stream.add(request_id)
            self._num_unassigned += 1

    def end(self, request_id: str) -> None:
        """Remove a request that has ended, for any reason."""
        with self._lock:
            replica = self._replica_of.pop(request_id, None)
            self._num_unassigned -= replica == ""
            self._dispatched_at.pop(request_id, None)
            self._without_stream.discard(request_id)
            self._recently_routed.ended(request_id)
            if replica:
                self.routing.ended(replica, request_id)
            if replica in self._observed and replica not in self._listed:
                self._update_observed()

    def replica_of(self, request_id: str) -> str:
        """Return the replica of a request; empty before it is dispatched."""
        return self._replica_of.get(request_id, "")

    def dispatched_at(self, request_id: str) -> float | None:
        """Return when a request was dispatched, in monotonic seconds; None before that."""
        return self._dispatched_at.get(request_id)

    def stall_allowance(self, request_id: str, stall_timeout_s: float) -> float:
        """Return the seconds until a request without tokens must be checked again; 0: its replica has stalled.

        A request that has no replica yet, or whose replica has a queue, is checked again after a quarter of the
        timeout. So is one whose tokens come together at the end, while its replica computes. Otherwise its replica has
        ``stall_timeout_s`` seconds from the dispatch to the first token. It is never more than ``stall_timeout_s``:
        StallWatch relies on that.
        """
        replica, now = self.replica_of(request_id), time.monotonic()
        needs_queue = request_id not in self._without_stream
        if not replica or self.routing.is_busy(replica, now=now, within_s=stall_timeout_s, needs_queue=needs_queue):
            return stall_timeout_s / 4
        return max(0.0, self._dispatched_at.get(request_id, now) + stall_timeout_s - now)

    def queued(self) -> tuple[int, int]:
        """Return (waiting requests, queued prefill tokens) of all replicas, requests without a replica included."""
        num_requests, num_tokens = self.routing.total_queued(now=time.monotonic())
        return num_requests + self.num_unassigned, num_tokens

    # --- for metrics and the web page -----------------------------------------------------------------------------

    def recently_routed(self) -> list[RoutedRequest]:
        """Return the last routed requests of this process, the latest last."""
        with self._lock:
            return self._recently_routed.requests()

    def report_state(self) -> None:
        """Set the gauges."""
        self._recorder.set(REPLICAS, len(self._listed), state="running")
        self._recorder.set(REPLICAS, len(self._observed) - len(self._listed), state="draining")
        self._recorder.set(KV_INDEX_BLOCKS, len(self.routing.index))


@cache
def cluster_view(deployment: str) -> ClusterView:
    """Return this process's view of ``deployment``."""
    return ClusterView()
