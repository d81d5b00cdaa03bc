"""The simulation: requests arrive at ingresses, a policy sends them to replicas, failures happen.

A policy chooses a replica's name. The baselines see the exact state of the replicas without delay; the production
policy (production.py) sees only the reports and events that its ingress has received.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol, runtime_checkable

from benchmarks.routing.cache import BlockCache
from benchmarks.routing.replica import Job, Settings, SimulatedReplica
from benchmarks.routing.shared_steps import SharedStepReplica
from benchmarks.routing.traces import Request
from benchmarks.routing.transfers import Transfers

__all__ = ["Change", "Cluster", "Policy", "RouterPolicy", "simulate"]

RETRY_S = 0.05  # until an ingress notices that a replica has failed its request
NOTICED_S = 1.0  # until Serve notifies the ingresses of a lost replica


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a replica."""

    at: float
    kind: str  # kill | add | restart (under the same name, its cache is empty) | slow
    replica: str
    slowdown: float = 1.0  # of the steps of a replica that becomes slow


class Policy(Protocol):
    """Chooses a replica for each request, and is notified of dispatches and ends."""

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str | None:
        """Return the name of a replica; ``job.predicted_blocks`` is the cached blocks that the policy expects.

        None: the request waits in the policy's own queue, as only a ``RouterPolicy`` has one.
        """

    def dispatched(self, job: Job, now: float) -> None:
        """``job`` goes to ``job.replica``."""

    def completed(self, job: Job, now: float) -> None:
        """``job`` has ended, or failed."""

    def replicas_changed(self, names: Sequence[str]) -> None:
        """These are the current replicas."""


@runtime_checkable
class RouterPolicy(Policy, Protocol):
    """A policy for which a router outside the simulation decides. It sees answers, so it learns when they begin."""

    def first_token(self, job: Job, now: float) -> None:
        """The prefill of ``job`` has ended."""

    def admitted(self) -> Sequence[Job]:
        """Return the requests that have left the policy's own queue: ``choose`` has a replica for each now."""


@dataclass(eq=False)
class Cluster:
    """The replicas, and the requests on their way to them."""

    settings: Settings
    replicas: dict[str, SimulatedReplica] = field(default_factory=dict)
    all_replicas: list[SimulatedReplica] = field(default_factory=list)  # with those that have ended
    outstanding: Counter[str] = field(default_factory=Counter)  # dispatched and not ended
    coming_tokens: Counter[str] = field(default_factory=Counter)  # dispatched and not arrived
    coming_blocks: dict[str, Counter[int]] = field(default_factory=dict)  # dispatched and not prefilled
    generation_blocks: dict[str, set[int]] = field(default_factory=dict)  # ever sent to this life of the replica
    old_blocks: dict[str, set[int]] = field(default_factory=dict)  # sent to earlier lives

    def add(self, name: str) -> None:
        """Add an empty replica."""
        kind = SimulatedReplica if self.settings.steps is None else SharedStepReplica
        self.replicas[name] = replica = kind(name, self.settings)
        self.all_replicas.append(replica)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Reset the records of a replica that starts."""
        self.old_blocks.setdefault(name, set()).update(self.generation_blocks.get(name, ()))
        self.coming_blocks[name], self.generation_blocks[name] = Counter(), set()
        self.outstanding[name] = self.coming_tokens[name] = 0

    def match(self, name: str, hashes: Sequence[int]) -> int:
        """Return how many leading blocks a replica will hold when it prefills a new request."""
        cache, coming = self.replicas[name].cache, self.coming_blocks[name]
        for depth, block in enumerate(hashes):
            if block not in cache and not coming[block]:
                return depth
        return len(hashes)

    def queued_tokens(self, name: str, now: float) -> int:
        """Return the tokens to compute on a replica, with those of requests on their way."""
        return self.replicas[name].queued_tokens(now) + self.coming_tokens[name]


@dataclass(eq=False)
class Result:
    """The outcome of a run."""

    jobs: list[Job]
    cluster: Cluster
    pulled_tokens: int = 0
    ghosts: int = 0  # requests routed to blocks that only an earlier life of the replica had


class _Simulation:
    def __init__(self, cluster: Cluster, policy: Policy, result: Result) -> None:
        self.cluster, self.policy, self.result = cluster, policy, result
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = count()
        self.lost: set[Job] = set()
        self.transfers = Transfers(cluster.replicas, self.at, self.queue)
        self.router = policy if isinstance(policy, RouterPolicy) else None

    def at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), action))

    def run(self) -> None:
        while self.events:
            time, _, action = heapq.heappop(self.events)
            action(time)

    def route(self, job: Job, now: float, avoid: Collection[str] = ()) -> None:
        cluster = self.cluster
        name = self.policy.choose(job, now, avoid)
        if name is None:
            return
        job.replica = name
        if name not in cluster.replicas:  # lost, and its ingress has not noticed yet
            job.retries += 1
            self.at(now + RETRY_S, lambda time: self.route(job, time, {*avoid, name}))
            return
        promised = () if job.source else job.request.hashes[: job.predicted_blocks]
        if cluster.old_blocks[name] and cluster.old_blocks[name].difference(
            cluster.generation_blocks[name]
        ).intersection(promised):
            self.result.ghosts += 1
        job.tokens = max(1, job.request.input_tokens - cluster.match(name, job.request.hashes) * 512)
        self.policy.dispatched(job, now)
        cluster.outstanding[name] += 1
        cluster.coming_tokens[name] += job.tokens
        cluster.coming_blocks[name].update(job.request.hashes)
        cluster.generation_blocks[name].update(job.request.hashes)
        self.at(now + cluster.settings.dispatch_s, lambda time: self.arrive(job, job.tokens, name, time))

    def route_admitted(self, now: float) -> None:
        if self.router is not None:
            for job in self.router.admitted():
                self.route(job, now)

    def arrive(self, job: Job, tokens: int, name: str, now: float) -> None:
        replica = self.cluster.replicas.get(name)
        if replica is None:
            self.fail(job, now)
            return
        self.cluster.coming_tokens[name] = max(0, self.cluster.coming_tokens[name] - tokens)
        self.cluster.generation_blocks[name].update(job.request.hashes)  # the replica may have restarted meanwhile
        if not self.transfers.arrive(job, replica, now):
            self.queue(job, replica, now)

    def queue(self, job: Job, replica: SimulatedReplica, now: float) -> None:
        replica.arrive(job, now)
        self.start(replica, now)

    def start(self, replica: SimulatedReplica, now: float) -> None:
        work, cache = replica.begin(now), replica.cache
        if work is not None:
            for job in work.started:
                self.cluster.coming_blocks[replica.name].subtract(job.request.hashes)
            self.at(work.ends_at, lambda time: self.finish(replica, cache is replica.cache, time))

    def finish(self, replica: SimulatedReplica, same_life: bool, now: float) -> None:
        if not same_life:
            return  # it was lost
        finished, cache = replica.finish(now), replica.cache
        for job in finished.first_tokens:
            if self.router is not None:
                self.router.first_token(job, now)
            if finished.decode_s is not None:
                ends_at = now + finished.decode_s
                self.at(ends_at, partial(self.end_decode, replica, job, cache))
        for job in finished.ended:
            self.end(replica, job, True, now)
        self.route_admitted(now)
        self.start(replica, now)

    def end_decode(self, replica: SimulatedReplica, job: Job, cache: BlockCache, now: float) -> None:
        self.end(replica, job, cache is replica.cache, now)

    def end(self, replica: SimulatedReplica, job: Job, same_life: bool, now: float) -> None:
        if self.cluster.replicas.get(replica.name) is replica and same_life and job not in self.lost:
            replica.end(job, now)
            job.ended_at = now
            self.cluster.outstanding[replica.name] -= 1
            self.policy.completed(job, now)
            self.route_admitted(now)
            self.start(replica, now)

    def fail(self, job: Job, now: float) -> None:
        job.retries += 1
        self.policy.completed(job, now)
        self.at(now + RETRY_S, lambda time: self.route(job, time, {job.replica}))

    def change(self, change: Change, now: float) -> None:
        cluster, name = self.cluster, change.replica
        if change.kind == "slow":
            replica = cluster.replicas[name]
            assert isinstance(replica, SharedStepReplica), "only shared steps can become slow"
            replica.slowdown = change.slowdown
            return
        if change.kind == "add":
            cluster.add(name)
        else:
            replica = cluster.replicas[name]
            decoding = [job for job in self.result.jobs if job.replica == name and job.first_token_at >= 0]
            self.lost.update(decoding)  # their answers end here, after their first token
            for job in replica.restart(now):
                self.fail(job, now)
            if change.kind == "kill":
                del cluster.replicas[name]
            else:
                cluster.forget(name)
        names = list(cluster.replicas)
        delay = NOTICED_S if change.kind == "kill" else 0.0
        self.at(now + delay, lambda time: self.policy.replicas_changed(names))


def simulate(
    requests: Sequence[Request],
    settings: Settings,
    make_policy: Callable[[Cluster], Policy],
    *,
    changes: Sequence[Change] = (),
    seed: int = 0,
) -> Result:
    """Run a trace; requests go to the ingresses at random, with a fixed seed."""
    rng = random.Random(seed)
    cluster = Cluster(settings)
    for number in range(settings.num_replicas):
        cluster.add(f"replica-{number:02}")
    jobs = [Job(number, request, rng.randrange(settings.num_ingresses)) for number, request in enumerate(requests)]
    policy = make_policy(cluster)
    policy.replicas_changed(list(cluster.replicas))
    result = Result(jobs, cluster)
    simulation = _Simulation(cluster, policy, result)
    for job in jobs:
        simulation.at(job.request.at, lambda time, job=job: simulation.route(job, time))  # type: ignore[misc]
    for change in changes:
        simulation.at(change.at, lambda time, change=change: simulation.change(change, time))  # type: ignore[misc]
    simulation.run()
    result.pulled_tokens = simulation.transfers.num_tokens
    return result
