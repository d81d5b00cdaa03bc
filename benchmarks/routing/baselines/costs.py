"""Baselines that weigh exact cache contents against load in one cost or score."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev

from benchmarks.routing.baselines.base import Baseline
from benchmarks.routing.replica import Job
from benchmarks.routing.traces import BLOCK_SIZE

__all__ = ["AIBrixLike", "DynamoLike", "LMetric", "LlmdLike"]


class AIBrixLike(Baseline):
    """The longest match among replicas with at most mean + sigmas x deviation requests; the fewest if unbalanced."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the least busy replica if they are unbalanced, else the longest match within the limit."""
        fewest, most = self.spread(names)
        if most - fewest > self.parameters["imbalance"]:
            return self.least_requests(names)
        loads, depths = [self.requests(name) for name in names], self.depths(job, names)
        limit = sum(loads) / len(loads) + self.parameters["sigmas"] * pstdev(loads)
        within = [name for name in names if self.requests(name) <= limit and depths[name]]
        return (
            max(within, key=lambda name: (depths[name], -self.requests(name))) if within else self.least_requests(names)
        )


class LlmdLike(Baseline):
    """A weighted sum of scores from 0 to 1: cached prefix, queued tokens, free KV blocks."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the replica with the highest sum of scores."""
        prefix, queue, memory = self.parameters["weights"]
        depths, blocks = self.depths(job, names), max(1, len(job.request.hashes))
        queued = {name: self.cluster.queued_tokens(name, now) for name in names}
        longest, shortest = max(queued.values()), min(queued.values())

        def score(name: str) -> float:
            idle = (longest - queued[name]) / (longest - shortest) if longest > shortest else 1.0
            free = 1 - self.cluster.replicas[name].cache.num_used / self.cluster.settings.cache_blocks
            return float(prefix * depths[name] / blocks + queue * idle + memory * free)

        return max(names, key=score)


class LMetric(Baseline):
    """(queued + new tokens) x (batch + 1); the batch is all requests of the replica, or only the running ones."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the replica with the lowest product."""
        depths, tokens = self.depths(job, names), job.request.input_tokens

        def cost(name: str) -> float:
            replica = self.cluster.replicas[name]
            running = replica.decoding + (replica.current is not None)
            batch = running if self.parameters["batch"] == "running" else self.requests(name)
            new = max(1, tokens - depths[name] * BLOCK_SIZE)
            return float((self.cluster.queued_tokens(name, now) + new) * (batch + 1))

        return min(names, key=cost)


class DynamoLike(Baseline):
    """weight x blocks to prefill + blocks in use by decodes."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the replica with the lowest sum."""
        depths, tokens = self.depths(job, names), job.request.input_tokens

        def cost(name: str) -> float:
            new = max(1, tokens - depths[name] * BLOCK_SIZE)
            prefill = (self.cluster.queued_tokens(name, now) + new) / BLOCK_SIZE
            return float(self.parameters["weight"] * prefill + self.cluster.replicas[name].cache.num_used)

        return min(names, key=cost)
