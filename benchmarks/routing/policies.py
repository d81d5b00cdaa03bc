"""The baselines: what other systems do, re-implemented from their descriptions, each with its parameters.

They see the cluster as it is: exact queues and caches, at once, through one ingress. That flatters those which in
reality guess (the trees of SGLang, of the production stack and of Ray Serve LLM) or hear late.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from statistics import pstdev
from typing import Any

import xxhash

from benchmarks.routing.replica import Job
from benchmarks.routing.simulation import Cluster
from benchmarks.routing.traces import BLOCK_SIZE

__all__ = ["BASELINES", "Baseline"]


class Baseline:
    """A policy that looks at the cluster; subclasses say how to choose among ``names``."""

    def __init__(self, cluster: Cluster, **parameters: Any) -> None:
        self.cluster = cluster
        self.parameters = parameters
        self.names: list[str] = []
        self.turn = 0
        self.rng = random.Random(1)

    def choose(self, job: Job, now: float, avoid: Collection[str]) -> str:
        """Leave out the avoided, if anything is left."""
        self.turn += 1
        shift = self.turn % len(self.names)  # equals take turns
        names = [name for name in self.names[shift:] + self.names[:shift] if name not in avoid]
        return self.pick(job, names or self.names, now)

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Return one of ``names``."""
        raise NotImplementedError

    def dispatched(self, job: Job, now: float) -> None:
        """Nothing to note."""

    def completed(self, job: Job, now: float) -> None:
        """Nothing to note."""

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Take the replicas that are there now."""
        self.names = list(names)

    # --- what baselines look at --------------------------------------------------------------------------------------

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


class RoundRobin(Baseline):
    """In turn."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """The next."""
        return names[0]


class LeastRequests(Baseline):
    """Fewest requests in flight."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """The least loaded."""
        return self.least_requests(names)


class LeastQueuedTokens(Baseline):
    """Fewest prompt tokens to compute, blind to caches."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """The shortest queue."""
        return min(names, key=lambda name: self.cluster.queued_tokens(name, now))


class BoundedHashing(Baseline):
    """CHWBL (Mirrokni et al.): a ring of virtual nodes, the first within the bound behind the prefix's hash."""

    def replicas_changed(self, names: Sequence[str]) -> None:
        """Build the ring."""
        super().replicas_changed(names)
        points = ((xxhash.xxh64_intdigest(f"{name}/{node}".encode()), name) for name in names for node in range(256))
        self.ring = sorted(points)

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Walk the ring."""
        hashes = job.request.hashes
        prefix = hashes[min(self.parameters["blocks"], len(hashes)) - 1] if hashes else job.number
        start = bisect_left(self.ring, (xxhash.xxh64_intdigest(str(prefix).encode()), ""))
        limit = self.parameters["bound"] * (sum(map(self.requests, names)) + 1) / len(names)
        for offset in range(len(self.ring)):
            name = self.ring[(start + offset) % len(self.ring)][1]
            if name in names and self.requests(name) + 1 <= max(1.0, limit):
                return name
        return self.least_requests(names)


class _Tree:
    """What a router believes of the caches: what it sent, least recently used forgotten first."""

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
    """With a tree of what was sent; as large as the caches are unless said otherwise, which flatters it."""

    def __init__(self, cluster: Cluster, **parameters: Any) -> None:
        super().__init__(cluster, **parameters)
        self.tree = _Tree(cluster.settings.cache_blocks * parameters.get("caches", 1))

    def dispatched(self, job: Job, now: float) -> None:
        """Believe that it will be cached."""
        self.tree.insert(job.replica, job.request.hashes)

    def best(self, job: Job, names: Sequence[str]) -> tuple[str, float]:
        """Return the replica that matches most, and the matched share of the prompt."""
        name = max(names, key=lambda name: self.tree.match(name, job.request.hashes))
        return name, self.tree.match(name, job.request.hashes) * BLOCK_SIZE / job.request.input_tokens


class SGLangLike(_TreeBaseline):
    """cache_aware: the longest match if it is long enough, else the smallest tree; least requests if unbalanced."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Balance first."""
        fewest, most = self.spread(names)
        if most - fewest > self.parameters["absolute"] and most > self.parameters["relative"] * fewest:
            return self.least_requests(names)
        name, share = self.best(job, names)
        return name if share > self.parameters["threshold"] else min(names, key=self.tree.size)


class ProductionStackLike(_TreeBaseline):
    """prefixaware: any of those with the longest match, whatever their load; its trie forgets nothing."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Match only."""
        depths = {name: self.tree.match(name, job.request.hashes) for name in names}
        deepest = max(depths.values())
        if deepest < self.parameters["least_blocks"]:
            return self.rng.choice(names)
        return self.rng.choice([name for name in names if depths[name] == deepest])


class RayServeLike(_TreeBaseline):
    """PrefixCacheAffinityRouter: the longest match above a threshold, else the smallest tree; of two if unbalanced."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Balance first, if told to."""
        fewest, most = self.spread(names)
        if most - fewest > self.parameters["imbalance"]:
            return self.least_requests(self.rng.sample(names, min(2, len(names))))
        name, share = self.best(job, names)
        return name if share >= self.parameters["threshold"] else min(names, key=self.tree.size)


class AIBrixLike(Baseline):
    """The longest match among those within mean + sigma of the requests; least requests if far out of balance."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """Balance first."""
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
    """Weighted scores from 0 to 1: prefix, queue of tokens, free KV."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """The highest sum."""
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
    """(queued + new tokens) x (batch + 1), the batch being all requests there or only those that run."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """The lowest product."""
        depths, tokens = self.depths(job, names), job.request.input_tokens

        def cost(name: str) -> float:
            replica = self.cluster.replicas[name]
            running = replica.decoding + (replica.current is not None)
            batch = running if self.parameters["batch"] == "running" else self.requests(name)
            new = max(1, tokens - depths[name] * BLOCK_SIZE)
            return float((self.cluster.queued_tokens(name, now) + new) * (batch + 1))

        return min(names, key=cost)


class DynamoLike(Baseline):
    """overlap weight x blocks to prefill + blocks that decodes use."""

    def pick(self, job: Job, names: Sequence[str], now: float) -> str:
        """The lowest sum."""
        depths, tokens = self.depths(job, names), job.request.input_tokens

        def cost(name: str) -> float:
            new = max(1, tokens - depths[name] * BLOCK_SIZE)
            prefill = (self.cluster.queued_tokens(name, now) + new) / BLOCK_SIZE
            return float(self.parameters["weight"] * prefill + self.cluster.replicas[name].cache.num_used)

        return min(names, key=cost)


_RINGS = [{"blocks": blocks, "bound": bound} for blocks in (1, 2, 4, 8) for bound in (1.1, 1.25, 1.5)]

# name -> (policy, default parameters, the grid that it is tuned on; empty if it has nothing to tune)
BASELINES: dict[str, tuple[type[Baseline], dict[str, Any], list[dict[str, Any]]]] = {
    "round robin": (RoundRobin, {}, []),
    "least requests": (LeastRequests, {}, []),
    "least queued tokens": (LeastQueuedTokens, {}, []),
    "CHWBL": (BoundedHashing, {"blocks": 2, "bound": 1.25}, _RINGS),
    "KubeAI CHWBL": (
        BoundedHashing,
        {"blocks": 1, "bound": 1.25},
        [{"blocks": 1, "bound": bound} for bound in (1.1, 1.5, 2.0)],
    ),
    "SGLang-like": (
        SGLangLike,
        {"threshold": 0.5, "absolute": 32, "relative": 1.1},
        [{"threshold": t, "absolute": a, "relative": 1.1} for t in (0.1, 0.3, 0.5) for a in (2, 4, 8, 16)],
    ),
    "vLLM production stack-like": (
        ProductionStackLike,
        {"least_blocks": 0, "caches": 1 << 30},
        [{"least_blocks": blocks, "caches": 1 << 30} for blocks in (2, 4, 8, 16)],
    ),
    "AIBrix-like": (
        AIBrixLike,
        {"sigmas": 1.0, "imbalance": 8},
        [{"sigmas": s, "imbalance": i} for s in (0.0, 0.5, 1.0, 2.0) for i in (4, 8, 16)],
    ),
    "llm-d-like": (
        LlmdLike,
        {"weights": (2, 1, 1)},
        [{"weights": (p, q, 1)} for p, q in ((1, 1), (1, 2), (3, 2), (2, 3), (3, 1))],
    ),
    "LMetric": (LMetric, {"batch": "all"}, [{"batch": "all"}, {"batch": "running"}]),
    "Dynamo-like": (DynamoLike, {"weight": 1.0}, [{"weight": weight} for weight in (0.5, 2.0, 4.0, 8.0, 16.0)]),
    "Ray Serve LLM-like": (
        RayServeLike,
        {"imbalance": float("inf"), "threshold": 0.1},
        [{"imbalance": i, "threshold": t} for i in (2, 4, 8, 16) for t in (0.1, 0.3, 0.5)],
    ),
}
