"""CostRows: the numbers of all replicas that a decision compares, as columns of arrays.

A decision looks at every candidate, but with a few array operations and not one replica after the other: a thousand
replicas take hardly longer than ten. The row of a replica is its slot in KVIndex. It takes no lock: the caller holds
that of RoutingState.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from deployments.routing.cost import ReplicaCost, ReplicaCosts
from deployments.routing.held_blocks import HeldBlocks

__all__ = ["CostRows", "Rows"]

Rows = npt.NDArray[np.intp]

_GOLDEN_RATIO_64 = np.uint64(
    0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads values that differ in few bits (Fibonacci hashing)
)
_MASK_64 = 2**64 - 1


class CostRows:
    """A row for each slot; those without a replica are never looked at."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._costs = np.zeros((len(ReplicaCosts._fields), 0))
        self._seeds = np.zeros(0, np.uint64)  # for rendezvous hashing
        self._ranks_last = np.zeros(0, np.bool_)
        self._last_candidates: tuple[str, ...] | None = None
        self._last_rows: Rows = np.zeros(0, np.intp)

    def add(self, name: str, slot: int, seed: int) -> None:
        """Add a replica, which costs nothing yet.

        Args:
            name: of the replica.
            slot: in KVIndex.
            seed: 64 bits that differ from those of other replicas, and are the same in every ingress.
        """
        if (missing := slot + 1 - len(self._seeds)) > 0:
            self._costs = np.pad(self._costs, ((0, 0), (0, missing)))
            self._seeds = np.pad(self._seeds, (0, missing))
            self._ranks_last = np.pad(self._ranks_last, (0, missing))
        self._rows[name] = slot
        self._costs[:, slot], self._seeds[slot], self._ranks_last[slot] = 0.0, seed, False

    def remove(self, name: str) -> None:
        """Remove a replica."""
        del self._rows[name]
        self._last_candidates = None

    def update(self, name: str, cost: ReplicaCost, *, ranks_last: bool) -> None:
        """Take over the cost of a replica."""
        row, costs = self._rows[name], self._costs
        costs[0, row], costs[1, row] = cost.queue_s, cost.seconds_per_token
        costs[2, row], costs[3, row] = cost.step_s, cost.kv_token_s
        self._ranks_last[row] = ranks_last

    def knows(self, candidates: Sequence[str]) -> bool:
        """Whether all of some replicas have a row."""
        return candidates is self._last_candidates or self._rows.keys() >= set(candidates)

    def rows(self, candidates: Sequence[str]) -> Rows:
        """Return the rows of some replicas, all of them known. The same tuple again is not looked up again."""
        if candidates is not self._last_candidates:
            self._last_rows = np.array([self._rows[name] for name in candidates], np.intp)
            self._last_candidates = candidates if isinstance(candidates, tuple) else None
        return self._last_rows

    def costs(self, rows: Rows) -> ReplicaCosts:
        """Return the numbers of some rows."""
        return ReplicaCosts(*self._costs[:, rows])

    def held(self, num_blocks: HeldBlocks | Mapping[str, int], rows: Rows) -> npt.NDArray[np.float64]:
        """Return how many blocks each row holds."""
        if isinstance(num_blocks, HeldBlocks):
            return num_blocks.by_slot(len(self._seeds))[rows]
        of_all = np.zeros(len(self._seeds))
        for name, number in num_blocks.items():
            of_all[self._rows[name]] = number
        return of_all[rows]

    def tiers(self, rows: Rows, avoid: Collection[str]) -> npt.NDArray[np.int8] | None:
        """Return 0 for usual replicas, 1 for those that rank last, 2 for those to avoid; None if all are usual."""
        if not avoid and not self._ranks_last.any():
            return None
        of_all = self._ranks_last.astype(np.int8)
        for name in avoid:
            if (row := self._rows.get(name)) is not None:
                of_all[row] = 2
        return of_all[rows]

    def rendezvous(self, rows: Rows, block: int) -> int:
        """Return which of some rows has the highest hash with a block: every ingress finds the same replica."""
        return int(np.argmax((self._seeds[rows] ^ np.uint64(block & _MASK_64)) * _GOLDEN_RATIO_64))
