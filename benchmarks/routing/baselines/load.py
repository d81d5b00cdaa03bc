"""Baselines that choose by load or by a hash of the prompt, and do not look at the caches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import xxhash

from benchmarks.routing.baselines.base import Baseline
from benchmarks.routing.replica import Job

__all__ = ["BoundedHashing", "LeastQueuedTokens", "LeastRequests", "RoundRobin"]


class RoundRobin(Baseline):
    """Each replica in turn."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the next replica."""
        return names[0]


class LeastRequests(Baseline):
    """The fewest requests in flight."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the replica with the fewest requests."""
        return self.least_requests(names)


class LeastQueuedTokens(Baseline):
    """The fewest queued prompt tokens, whatever is cached."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the replica with the shortest queue."""
        return min(names, key=lambda name: self.cluster.queued_tokens(name, now))


class BoundedHashing(Baseline):
    """CHWBL (Mirrokni et al.): the first virtual node on a ring, from the prefix's hash on, within the bound."""

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Build the ring."""
        super().replicas_changed(names)
        points = ((xxhash.xxh64_intdigest(f"{name}/{node}".encode()), name) for name in names for node in range(256))
        self.ring = sorted(points)

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the first replica on the ring, from the prefix's hash on, that has no more requests than the bound."""
        hashes = job.request.hashes
        prefix = hashes[min(self.parameters["blocks"], len(hashes)) - 1] if hashes else job.number
        start = bisect_left(self.ring, (xxhash.xxh64_intdigest(str(prefix).encode()), ""))
        limit = self.parameters["bound"] * (sum(map(self.requests, names)) + 1) / len(names)
        for offset in range(len(self.ring)):
            name = self.ring[(start + offset) % len(self.ring)][1]
            if name in names and self.requests(name) + 1 <= max(1.0, limit):
                return name
        return self.least_requests(names)
