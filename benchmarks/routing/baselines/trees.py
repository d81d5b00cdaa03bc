"""Baselines that estimate the caches with a tree of what they have sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from benchmarks.routing.baselines.base import Baseline
from benchmarks.routing.replica import Job
from benchmarks.routing.simulation import Cluster
from benchmarks.routing.traces import BLOCK_SIZE

__all__ = ["ProductionStackLike", "RayServeLike", "SGLangLike"]


class _Tree:
    """A router's estimate of the caches: the blocks sent to each replica, evicted in LRU order."""

    def __init__(self, max_blocks: float) -> None:
        self.max_blocks = max_blocks
        self.blocks: dict[str, OrderedDict[int, None]] = {}

    def insert(self, name: str, hashes: Sequence[int]) -> None:
        held = self.blocks.setdefault(name, OrderedDict())
        for block in reversed(hashes):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.max_blocks:
            held.popitem(last=False)

    def match(self, name: str, hashes: Sequence[int]) -> int:
        held = self.blocks.get(name, ())
        return next((depth for depth, block in enumerate(hashes) if block not in held), len(hashes))

    def size(self, name: str) -> int:
        return len(self.blocks.get(name, ()))


class _TreeBaseline(Baseline):
    """A baseline with such a tree, by default as large as the caches really are, which flatters it."""

    def __init__(self, cluster: Cluster, **parameters: Any) -> None:
        super().__init__(cluster, **parameters)
        self.tree = _Tree(cluster.settings.cache_blocks * parameters.get("caches", 1))

    def dispatched(self, job: Job, now: float) -> None:
        """Assume that the replica will cache the whole prompt."""
        self.tree.insert(job.replica, job.request.hashes)

    def best(self, job: Job, names: Sequence[str]) -> tuple[str, float]:
        """Return the replica that matches most, and the matched share of the prompt."""
        name = max(names, key=lambda name: self.tree.match(name, job.request.hashes))
        return name, self.tree.match(name, job.request.hashes) * BLOCK_SIZE / job.request.input_tokens


class SGLangLike(_TreeBaseline):
    """cache_aware: the longest match if it is long enough, else the smallest tree; fewest requests if unbalanced."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the least busy replica if they are unbalanced, else the best match."""
        fewest, most = self.spread(names)
        if most - fewest > self.parameters["absolute"] and most > self.parameters["relative"] * fewest:
            return self.least_requests(names)
        name, share = self.best(job, names)
        return name if share > self.parameters["threshold"] else min(names, key=self.tree.size)


class ProductionStackLike(_TreeBaseline):
    """prefixaware: any replica with the longest match, whatever its load; its trie never evicts."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return a replica with the longest match, at random among equals."""
        depths = {name: self.tree.match(name, job.request.hashes) for name in names}
        deepest = max(depths.values())
        if deepest < self.parameters["least_blocks"]:
            return self.rng.choice(names)
        return self.rng.choice([name for name in names if depths[name] == deepest])


class RayServeLike(_TreeBaseline):
    """PrefixCacheAffinityRouter: the longest match above a threshold, else the smallest tree; of two if unbalanced."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return the less busy of two random replicas if they are unbalanced, else the best match."""
        fewest, most = self.spread(names)
        if most - fewest > self.parameters["imbalance"]:
            return self.least_requests(self.rng.sample(names, min(2, len(names))))
        name, share = self.best(job, names)
        return name if share >= self.parameters["threshold"] else min(names, key=self.tree.size)
