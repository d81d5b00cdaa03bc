"""The simulation: requests arrive at ingresses, a policy sends them to replicas, failures happen.

A policy sees the cluster and answers with a replica's name. The baselines look at the replicas as they are, at once and
without an error; the production policy (production.py) only at what reports and events have told its ingress.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from benchmarks.routing.replica import Job, Settings, SimulatedReplica
from benchmarks.routing.traces import Request

__all__ = ["Change", "Cluster", "Policy", "simulate"]

RETRY_S = 0.05  # until an ingress sees that a replica has failed its request
NOTICED_S = 1.0  # until Serve tells the ingresses that a replica is gone


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happens to a replica."""

    at: float
    kind: str  # kill | add | restart (under the same name, its cache is empty)
    replica: str


class Policy(Protocol):
    """Chooses a replica for a request; it is told of dispatches and ends."""

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str:
        """Return the name of a replica; ``job.predicted_blocks`` is what the policy thinks is cached there."""

    def dispatched(self, job: Job, now: float) -> None:
        """``job`` goes to ``job.replica``."""

    def completed(self, job: Job, now: float) -> None:
        """``job`` has ended, or failed."""

    def replicas_changed(self, names: Sequence[str]) -> None:
        """These replicas are there now."""


@dataclass(eq=False)
class Cluster:
    """The replicas, and what is on its way to them."""

    settings: Settings
    replicas: dict[str, SimulatedReplica] = field(default_factory=dict)
    all_replicas: list[SimulatedReplica] = field(default_factory=list)  # the gone ones too
    outstanding: Counter[str] = field(default_factory=Counter)  # dispatched and not ended
    coming_tokens: Counter[str] = field(default_factory=Counter)  # dispatched and not arrived
    coming_blocks: dict[str, Counter[int]] = field(default_factory=dict)  # dispatched and not prefilled
    generation_blocks: dict[str, set[int]] = field(default_factory=dict)  # ever sent to this life of the replica
    old_blocks: dict[str, set[int]] = field(default_factory=dict)  # sent to earlier lives

    def add(self, name: str) -> None:
        """Begin an empty replica."""
        self.replicas[name] = replica = SimulatedReplica(name, self.settings)
        self.all_replicas.append(replica)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Begin a life of a replica."""
        self.old_blocks.setdefault(name, set()).update(self.generation_blocks.get(name, ()))
        self.coming_blocks[name], self.generation_blocks[name] = Counter(), set()
        self.outstanding[name] = self.coming_tokens[name] = 0

    def match(self, name: str, hashes: Sequence[int]) -> int:
        """Return how many leading blocks a replica holds or will have computed before it comes to a new request."""
        cache, coming = self.replicas[name].cache, self.coming_blocks[name]
        for depth, block in enumerate(hashes):
            if block not in cache and not coming[block]:
                return depth
        return len(hashes)

    def queued_tokens(self, name: str, now: float) -> int:
        """Return the tokens to compute on a replica, what is on its way included."""
        return self.replicas[name].queued_tokens(now) + self.coming_tokens[name]


@dataclass(eq=False)
class Result:
    """What a run gave."""

    jobs: list[Job]
    cluster: Cluster
    ghosts: int = 0  # requests sent for the sake of blocks that only an earlier life of the replica had


class _Simulation:
    def __init__(self, cluster: Cluster, policy: Policy, result: Result) -> None:
        self.cluster, self.policy, self.result = cluster, policy, result
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = count()
        self.lost: set[Job] = set()

    def at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), action))

    def run(self) -> None:
        while self.events:
            time, _, action = heapq.heappop(self.events)
            action(time)

    def route(self, job: Job, now: float, avoid: Collection[str] = ()) -> None:
        cluster = self.cluster
        job.replica = name = self.policy.choose(job, now, avoid)
        if name not in cluster.replicas:  # gone, and its ingress does not know yet
            job.retries += 1
            self.at(now + RETRY_S, lambda time: self.route(job, time, {*avoid, name}))
            return
        promised = job.request.hashes[: job.predicted_blocks]
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

    def arrive(self, job: Job, tokens: int, name: str, now: float) -> None:
        replica = self.cluster.replicas.get(name)
        if replica is None:
            self.fail(job, now)
            return
        self.cluster.coming_tokens[name] = max(0, self.cluster.coming_tokens[name] - tokens)
        replica.arrive(job, now)
        self.start(replica, now)

    def start(self, replica: SimulatedReplica, now: float) -> None:
        ends = replica.start(now)
        if ends is not None:
            job = replica.current
            assert job is not None
            self.cluster.coming_blocks[replica.name].subtract(job.request.hashes)
            self.at(ends, lambda time: self.end_prefill(replica, job, time))

    def end_prefill(self, replica: SimulatedReplica, job: Job, now: float) -> None:
        if replica.current is not job:
            return  # it was lost
        replica.end_prefill(now)
        decode_s = (job.request.output_tokens - 1) * self.cluster.settings.decode_step_s
        cache = replica.cache
        self.at(now + decode_s, lambda time: self.end(replica, job, cache is replica.cache, time))
        self.start(replica, now)

    def end(self, replica: SimulatedReplica, job: Job, same_life: bool, now: float) -> None:
        if self.cluster.replicas.get(replica.name) is replica and same_life and job not in self.lost:
            replica.end(job, now)
            self.cluster.outstanding[replica.name] -= 1
            self.policy.completed(job, now)
            self.start(replica, now)

    def fail(self, job: Job, now: float) -> None:
        job.retries += 1
        self.policy.completed(job, now)
        self.at(now + RETRY_S, lambda time: self.route(job, time, {job.replica}))

    def change(self, change: Change, now: float) -> None:
        cluster, name = self.cluster, change.replica
        if change.kind == "add":
            cluster.add(name)
        else:
            replica = cluster.replicas[name]
            decoding = [job for job in self.result.jobs if job.replica == name and job.first_token_at >= 0]
            self.lost.update(decoding)  # their answers end here: they have had their first token
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
    return result
