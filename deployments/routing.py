"""The routing policy: which replica should get a prompt, in plain names and numbers.

The replica that is thought to hold the longest part of the prompt gets it, unless its load exceeds a bound; a prompt
that nobody holds goes by rendezvous hashing, so that every ingress chooses alike and a burst of one new prompt meets
on one replica. It knows nothing of Ray: router.py binds it to Serve, and tests call it as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

import xxhash

from deployments.kv_index import KVIndex

__all__ = ["Ranking", "RoutingState", "load_limit", "rank", "routing_state"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Replicas in the order in which they should be tried, and why the first is first."""

    order: list[str]
    outcome: str  # hit | cold | balanced | fallback


def load_limit(loads: Mapping[str, int], bound: float, slack: int) -> float:
    """Return the load above which a replica gets no more requests for the sake of its cache."""
    return bound * sum(loads.values()) / len(loads) + slack


def rank(
    loads: Mapping[str, int],
    depths: Mapping[str, int],
    hashes: Sequence[int],
    *,
    bound: float,
    slack: int,
    turn: int = 0,
) -> Ranking:
    """Order the replicas in ``loads`` for a prompt with block ``hashes``, of which they hold ``depths``.

    Replicas within the load bound come first: by depth of the prefix they hold, then by rendezvous hashing on the block
    at which the prompt leaves what is cached anywhere. The others follow, least loaded first; equals take turns, so
    that prompts too short to have a block spread over an idle deployment.
    """
    names = sorted(loads)
    first = turn % len(names)
    by_load = sorted(names[first:] + names[:first], key=lambda name: loads[name])
    if not hashes:
        return Ranking(by_load, "fallback")
    limit = load_limit(loads, bound, slack)
    deepest = max((depths.get(name, 0) for name in loads), default=0)
    leaving_block = hashes[min(deepest, len(hashes) - 1)]

    def preference(name: str) -> tuple[int, int]:
        return -depths.get(name, 0), -xxhash.xxh64_intdigest(f"{leaving_block}:{name}".encode())

    preferred = sorted(loads, key=preference)
    within = [name for name in preferred if loads[name] <= limit]
    order = within + [name for name in by_load if loads[name] > limit]
    outcome = "balanced" if order[0] != preferred[0] else "hit" if deepest else "cold"
    return Ranking(order, outcome)


class RoutingState:
    """What one ingress process knows of a deployment's replicas."""

    def __init__(self) -> None:
        self.index = KVIndex()
        self.in_flight: Counter[str] = Counter()  # what this ingress has sent and not seen the end of
        self.replicas: frozenset[str] = frozenset()
        self.turns = count()

    def stored(self, replica: str, hashes: Sequence[int]) -> None:
        """Assume that a replica will hold a prompt's blocks, unless it has gone meanwhile."""
        if replica in self.replicas:
            self.index.stored(replica, hashes)

    def sent(self, replica: str) -> None:
        """Count a request in, unless the replica has gone meanwhile."""
        if replica in self.replicas:
            self.in_flight[replica] += 1

    def completed(self, replica: str) -> None:
        """Count a request out."""
        self.in_flight[replica] -= 1
        if self.in_flight[replica] <= 0:
            del self.in_flight[replica]

    def set_replicas(self, replicas: Collection[str]) -> None:
        """Take the replicas that are there now, and forget what those had that are not."""
        for gone in self.replicas.difference(replicas):
            self.index.cleared(gone)
            self.in_flight.pop(gone, None)
        self.replicas = frozenset(replicas)


@cache
def routing_state(deployment: str) -> RoutingState:
    """Return this process's state for ``deployment``, shared by its router and whoever reports on it."""
    return RoutingState()
