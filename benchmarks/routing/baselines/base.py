"""Baseline: the common part of the policies that Pagoda's router is compared with."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.routing.replica import Job
from benchmarks.routing.simulation import Cluster

__all__ = ["Baseline"]


class Baseline:
    """A policy that reads the state of the cluster; subclasses choose among ``names`` in ``pick``."""

    def __init__(self, cluster: Cluster, **parameters: Any) -> None:
        self.cluster = cluster
        self.parameters = parameters
        self.names: list[str] = []
        self.turn = 0
        self.rng = random.Random(1)

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str:
        """Choose among the replicas that are not avoided, or among all if every one is avoided."""
        self.turn += 1
        shift = self.turn % len(self.names)  # among equals, the first one rotates
        names = [name for name in self.names[shift:] + self.names[:shift] if name not in avoid]
        return self.pick(job, names or self.names, now)

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return one of ``names``."""
        raise NotImplementedError

    def dispatched(self, job: Job, now: float) -> None:
        """Ignored by default."""

    def completed(self, job: Job, now: float) -> None:
        """Ignored by default."""

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Store the names of the current replicas."""
        self.names = list(names)

    def requests(self, name: str) -> int:
        """Return the requests dispatched to a replica and not ended."""
        return self.cluster.outstanding[name]

    def least_requests(self, names: Sequence[str]) -> str:
        """Return the replica with the fewest requests."""
        return min(names, key=self.requests)

    def depths(self, job: Job, names: Sequence[str]) -> dict[str, int]:
        """Return how many of the prompt's leading blocks each replica will have."""
        return {name: self.cluster.match(name, job.request.hashes) for name in names}

    def spread(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the fewest and the most requests on a replica."""
        loads = [self.requests(name) for name in names]
        return min(loads), max(loads)
