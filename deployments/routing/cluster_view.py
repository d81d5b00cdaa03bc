"""ClusterView: what one ingress process knows of a deployment's engine replicas.

The router that Serve makes, the thread that receives KV events and the requests of this process all meet here: which
replicas there are and what they say of themselves (``routing``), and at which replica each request is. It knows
neither Serve nor HTTP; every method may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from deployments.observability.telemetry import (
    KV_INDEX_BLOCKS,
    REPLICAS,
    ROUTING_BEST_HIT_TOKENS,
    ROUTING_PREDICTED_HIT_TOKENS,
    ingress_recorder,
)
from deployments.routing.log import RoutedRequest, RoutingLog
from deployments.routing.policy import Decision, RoutingState
from deployments.wire.subscriber import KVEventSubscriber

__all__ = ["BLOCK_SIZE", "ENDPOINT", "ClusterView", "cluster_view"]

# What a replica says of itself once it is ready.
ENDPOINT = "kv_events_endpoint"
BLOCK_SIZE = "block_size"


class ClusterView:
    """The replicas of one deployment, and the requests that this process has with them."""

    def __init__(self) -> None:
        self.routing = RoutingState()
        self._recorder = ingress_recorder()
        self._subscriber: KVEventSubscriber | None = None
        self._lock = threading.Lock()
        self._replica_of: dict[str, str] = {}  # by request id; "" until one was chosen
        self._placed_at: dict[str, float] = {}  # by request id, once one was chosen
        self._log = RoutingLog()
        self._listed: dict[str, Mapping[str, Any]] = {}  # the replicas that take requests, and what they say
        self._heard: dict[str, Mapping[str, Any]] = {}  # those, and the ones that are told to go but still have ours

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas that take requests."""
        return frozenset(self._listed)

    @property
    def num_unplaced(self) -> int:
        """Requests of this process for which no replica has been chosen yet: there may be none."""
        return sum(not replica for replica in list(self._replica_of.values()))

    # --- for the router -------------------------------------------------------------------------------------------

    def set_replicas(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the replicas that take requests now, with what they say of themselves.

        Of the others those that still have requests of this process are listened to until these have ended: whether
        they hang is of interest while they drain. The rest are forgotten.
        """
        with self._lock:
            self._listed = dict(metadata)
            for described in metadata.values():
                self.routing.block_size = described.get(BLOCK_SIZE, self.routing.block_size)
            self._listen()

    def _listen(self) -> None:
        at_work = set(self._replica_of.values())
        leaving = {name: said for name, said in self._heard.items() if name in at_work and name not in self._listed}
        self._heard = self._listed | leaving
        self.routing.set_replicas(self._heard)
        endpoints = {name: said[ENDPOINT] for name, said in self._heard.items() if ENDPOINT in said}
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
        """Rank the candidates for a prompt, and count what is expected of the first one's cache."""
        decision = self.routing.choose(candidates, hashes, num_tokens, now=time.monotonic(), avoid=avoid)
        with self._lock:
            if request_id in self._replica_of:
                self._log.decided(request_id, decision)
        for metric, blocks in (
            (ROUTING_PREDICTED_HIT_TOKENS, decision.predicted_blocks),
            (ROUTING_BEST_HIT_TOKENS, decision.best_blocks),
        ):
            if blocks:
                self._recorder.increment(metric, blocks * self.routing.block_size)
        return decision

    def place(self, request_id: str, replica: str, hashes: Sequence[int], num_tokens: int) -> None:
        """A request goes to ``replica``; if another one did not take it, from there."""
        with self._lock:  # to the end: else a request could be counted out before it is counted in
            if request_id not in self._replica_of:  # its client has gone meanwhile
                return
            before, now = self._replica_of[request_id], time.monotonic()
            self._replica_of[request_id], self._placed_at[request_id] = replica, now
            if before:
                self.routing.completed(before, request_id)
            held = self.routing.dispatched(replica, hashes, num_tokens, now=now, request_id=request_id)
            self._log.placed(request_id, replica, num_tokens, held, self.routing.block_size)

    # --- for the requests -----------------------------------------------------------------------------------------

    def begin(self, request_id: str) -> None:
        """A request is about to look for a replica."""
        with self._lock:
            self._replica_of[request_id] = ""

    def end(self, request_id: str) -> None:
        """A request has ended, however."""
        with self._lock:
            replica = self._replica_of.pop(request_id, "")
            self._placed_at.pop(request_id, None)
            self._log.ended(request_id)
            if replica:
                self.routing.completed(replica, request_id)
            if replica in self._heard and replica not in self._listed:
                self._listen()

    def replica_of(self, request_id: str) -> str:
        """Return where a request is, or an empty name while that is open."""
        return self._replica_of.get(request_id, "")

    def placed_at(self, request_id: str) -> float | None:
        """Return when a request's replica was chosen, on the monotonic clock; None while that is open."""
        return self._placed_at.get(request_id)

    def patience(self, request_id: str, seconds: float) -> float:
        """Return how much longer a request that got no token for ``seconds`` may be silent with good reason.

        It is asked again soon while it is nowhere yet, or where there is a queue; until its replica has had as long.
        """
        replica, now = self.replica_of(request_id), time.monotonic()
        if not replica or self.routing.is_busy(replica, now=now, within_s=seconds):
            return seconds / 4
        return max(0.0, self._placed_at.get(request_id, now) + seconds - now)

    def queued(self) -> tuple[int, int]:
        """Return the requests, and the prefill tokens, that wait anywhere."""
        num_requests, num_tokens = self.routing.total_load(now=time.monotonic())
        return num_requests + self.num_unplaced, num_tokens

    # --- for whoever looks ----------------------------------------------------------------------------------------

    def recently_routed(self) -> list[RoutedRequest]:
        """Return where the last requests of this process went and why, the latest last."""
        with self._lock:
            return self._log.recent()

    def report_state(self) -> None:
        """Report the gauges."""
        self._recorder.set(REPLICAS, len(self._listed), state="running")
        self._recorder.set(REPLICAS, len(self._heard) - len(self._listed), state="draining")
        self._recorder.set(KV_INDEX_BLOCKS, len(self.routing.index))


@cache
def cluster_view(deployment: str) -> ClusterView:
    """Return this process's view of ``deployment``."""
    return ClusterView()
