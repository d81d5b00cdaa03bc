"""The production policy in the simulation: one unmodified ClusterView per ingress, with delayed or lost messages.

What has reached an ingress by the time of a decision is applied just before it, each piece with the time at which it
came: nothing is decided in between, so that is the same as applying it then.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import islice

from benchmarks.routing.replica import Job, SimulatedReplica
from benchmarks.routing.simulation import Cluster
from benchmarks.routing.traces import BLOCK_SIZE, Request, spread
from deployments.routing.cluster_view import ClusterView
from deployments.routing.options import RoutingOptions
from deployments.routing.policy import Decision
from deployments.transport.pages.address import PageAddress
from deployments.transport.request_channel.dispatch import Dispatch
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["ProductionPolicy"]

_DEFAULTS = RoutingOptions()
_PARAMS = SamplingParams(max_tokens=None)


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
        self.now = 0.0
        self.view = ClusterView(options, clock=lambda: self.now)
        self.routing = self.view.routing
        self.routing.block_size = BLOCK_SIZE
        self.cluster = cluster
        self.feeds: dict[str, _Feed] = {}
        self.dispatches: dict[int, tuple[Dispatch, Decision]] = {}  # by the job's number
        self.rng = random.Random(seed)

    def set_replicas(self, names: Sequence[str]) -> None:
        for dispatch, _ in self.dispatches.values():
            if dispatch.replica and dispatch.replica not in names:  # it is lost with its replica
                self.view.ended(dispatch)
        pulls = self.cluster.settings.pull_bytes_per_s > 0
        self.view.set_replicas({name: PageAddress(name, "secret").metadata if pulls else {} for name in names})
        self.feeds = {name: self.feeds.get(name) or _Feed(self.cluster.replicas[name]) for name in names}
        for name, feed in self.feeds.items():
            if feed.position == 0 and not feed.held:
                self.routing.replaced(name, [])

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
            self.routing.replaced(name, feed.held)
        while feed.position < len(log) and log[feed.position].at <= received:
            entry = log[feed.position]
            feed.position += 1
            if loss:
                feed.held = set() if entry.cleared else (feed.held | set(entry.stored)) - set(entry.removed)
                if self.rng.random() < loss and feed.resync_at < 0:  # the next batch shows the gap; a snapshot follows
                    feed.resync_at = now + 2 * self.cluster.settings.network_s + 0.1
                    self.routing.events_lost(name)
            if feed.resync_at >= 0:
                continue
            if entry.cleared:
                self.routing.cleared(name)
            if entry.awaited:
                self.routing.awaited(name, entry.awaited, now=now)
            if entry.stored:
                self.routing.stored(name, entry.stored)
            if entry.removed:
                self.routing.removed(name, entry.removed)

    def _receive_report(self, feed: _Feed, received: float) -> None:
        feed.replica.report_until(received)
        for at, load in islice(reversed(feed.replica.reports), 100):
            if at <= feed.report_at:
                return
            if at <= received and self.rng.random() >= self.cluster.settings.loss:
                feed.report_at = at
                self.routing.report(feed.replica.name, load, now=at + self.cluster.settings.network_s)
                return


class ProductionPolicy:
    """A policy with a router in each ingress."""

    def __init__(self, cluster: Cluster, options: RoutingOptions = _DEFAULTS, seed: int = 0) -> None:
        number = cluster.settings.num_ingresses
        self._ingresses = [_Ingress(cluster, options, seed * number + index) for index in range(number)]
        self._subsets: list[tuple[str, ...]] = []

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str:
        """Choose with the router of the job's ingress."""
        ingress, request = self._ingresses[job.ingress], job.request
        ingress.listen(now)
        ingress.now = now
        prompt = EngineRequest(str(job.number), [0] * request.input_tokens, _PARAMS)
        dispatch = Dispatch(prompt, request.hashes, avoid)
        decision = ingress.view.choose(dispatch, self._subset(request))
        assert decision is not None
        ingress.dispatches[job.number] = dispatch, decision
        job.predicted_blocks = decision.num_held_blocks
        if (fetch := decision.fetch) is not None and fetch.holder is not None:
            job.source, job.source_blocks = fetch.holder.name, fetch.num_blocks
        return decision.replica

    def _subset(self, request: Request) -> tuple[str, ...]:
        """Return the replicas of the prompt's group, by rendezvous hashing of its second block."""
        block = request.hashes[:2][-1] if request.hashes else request.input_tokens
        return max(enumerate(self._subsets), key=lambda subset: spread(block ^ spread(subset[0])))[1]

    def dispatched(self, job: Job, now: float) -> None:
        """Report it to the router of the job's ingress."""
        ingress = self._ingresses[job.ingress]
        ingress.now = now
        dispatch, decision = ingress.dispatches[job.number]
        dispatch.replica = job.replica
        ingress.view.sent(dispatch, decision)

    def completed(self, job: Job, now: float) -> None:
        """Report it to the router of the job's ingress."""
        ingress = self._ingresses[job.ingress]
        dispatch, _ = ingress.dispatches.pop(job.number)
        dispatch.num_tokens = job.request.output_tokens
        ingress.view.ended(dispatch)

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Report it to the routers of all ingresses."""
        number = self._ingresses[0].cluster.settings.num_subsets
        self._subsets = [tuple(names[first::number]) for first in range(number)]
        for ingress in self._ingresses:
            ingress.set_replicas(names)
