"""The production policy in the simulation: one unmodified RoutingState per ingress, with delayed or lost messages.

What has reached an ingress by the time of a decision is applied just before it, each piece with the time at which it
came: nothing is decided in between, so that is the same as applying it then.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import islice

from benchmarks.routing.replica import Job, SimulatedReplica
from benchmarks.routing.simulation import Cluster
from benchmarks.routing.traces import BLOCK_SIZE
from deployments.routing.options import RoutingOptions
from deployments.routing.state import RoutingState

__all__ = ["ProductionPolicy"]

_DEFAULTS = RoutingOptions()


class _Feed:
    """The messages of one replica that one ingress has received."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self.replica = replica
        replica.is_read = True
        self.position = 0  # in the replica's log
        self.report_at = -1.0
        self.held: set[int] = set()  # what a snapshot as of `position` has in it; kept only if batches get lost
        self.resync_at = -1.0  # when a snapshot will come, if a batch was lost


class _Ingress:
    def __init__(self, cluster: Cluster, options: RoutingOptions, seed: int) -> None:
        self.state = RoutingState(options)
        self.state.block_size = BLOCK_SIZE
        self.cluster = cluster
        self.feeds: dict[str, _Feed] = {}
        self.rng = random.Random(seed)

    def set_replicas(self, names: Sequence[str]) -> None:
        self.state.set_replicas(names)
        self.feeds = {name: self.feeds.get(name) or _Feed(self.cluster.replicas[name]) for name in names}
        for name, feed in self.feeds.items():
            if feed.position == 0 and not feed.held:
                self.state.replaced(name, [])

    def listen(self, now: float) -> None:
        """Apply the messages that have arrived."""
        received = now - self.cluster.settings.network_s
        for feed in self.feeds.values():
            self._receive_events(feed, received, now)
            self._receive_report(feed, received)

    def _receive_events(self, feed: _Feed, received: float, now: float) -> None:
        name, log, loss = feed.replica.name, feed.replica.log, self.cluster.settings.loss
        if 0 <= feed.resync_at <= now:
            feed.resync_at = -1.0
            self.state.replaced(name, feed.held)
        while feed.position < len(log) and log[feed.position].at <= received:
            entry = log[feed.position]
            feed.position += 1
            if loss:
                feed.held = set() if entry.cleared else (feed.held | set(entry.stored)) - set(entry.removed)
                if self.rng.random() < loss and feed.resync_at < 0:  # the next batch shows the gap; a snapshot follows
                    feed.resync_at = now + 2 * self.cluster.settings.network_s + 0.1
                    self.state.events_lost(name)
            if feed.resync_at >= 0:
                continue
            if entry.cleared:
                self.state.cleared(name)
            if entry.awaited:
                self.state.awaited(name, entry.awaited, now=now)
            if entry.stored:
                self.state.stored(name, entry.stored)
            if entry.removed:
                self.state.removed(name, entry.removed)

    def _receive_report(self, feed: _Feed, received: float) -> None:
        feed.replica.report_until(received)
        for at, load in islice(reversed(feed.replica.reports), 100):
            if at <= feed.report_at:
                return
            if at <= received and self.rng.random() >= self.cluster.settings.loss:
                feed.report_at = at
                self.state.report(feed.replica.name, load, now=at + self.cluster.settings.network_s)
                return


class ProductionPolicy:
    """A policy with a router in each ingress."""

    def __init__(self, cluster: Cluster, options: RoutingOptions = _DEFAULTS, seed: int = 0) -> None:
        number = cluster.settings.num_ingresses
        self._ingresses = [_Ingress(cluster, options, seed * number + index) for index in range(number)]
        self._names: list[str] = []

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str:
        """Choose with the router of the job's ingress."""
        ingress, request = self._ingresses[job.ingress], job.request
        ingress.listen(now)
        decision = ingress.state.choose(self._names, request.hashes, request.input_tokens, now=now, avoid=avoid)
        job.predicted_blocks = decision.num_cached_blocks
        return decision.order[0]

    def dispatched(self, job: Job, now: float) -> None:
        """Report it to the router of the job's ingress."""
        request = job.request
        self._ingresses[job.ingress].state.dispatched(
            job.replica, request.hashes, request.input_tokens, now=now, request_id=str(job.number)
        )

    def completed(self, job: Job, now: float) -> None:
        """Report it to the router of the job's ingress."""
        self._ingresses[job.ingress].state.ended(job.replica, str(job.number))

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Report it to the routers of all ingresses."""
        self._names = list(names)
        for ingress in self._ingresses:
            ingress.set_replicas(names)
