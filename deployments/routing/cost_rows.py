"""CostRows: the numbers of all replicas that a decision compares, as columns of arrays.

A decision looks at every replica, but with a few array operations and not one replica after the other: a thousand
replicas take hardly longer than ten. The row of a replica is its slot in KVIndex. Rows that are no candidates are
compared like the others, at an infinite cost: to pick out the candidates' rows would take longer than to compare all.
It takes no lock: the caller holds that of RoutingState.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from deployments.routing.cost import Prices, PromptBlocks, ReplicaCost, prompt_costs
from deployments.routing.held_blocks import HeldBlocks

__all__ = ["CostRows", "Rows"]

Rows = npt.NDArray[np.intp]
_Floats = npt.NDArray[np.float64]

_GOLDEN_RATIO_64 = np.uint64(
    0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads values that differ in few bits (Fibonacci hashing)
)
_MASK_64 = 2**64 - 1


class CostRows:
    """A row for each slot.

    Attributes:
        names: the replica of each row; empty: of none.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._columns = [np.zeros(0) for _ in ReplicaCost().numbers]
        self._seeds = np.zeros(0, np.uint64)  # for rendezvous hashing
        self._last: set[int] = set()  # rows of replicas that rank last
        self._candidates: tuple[str, ...] | None = None  # of the last decision
        self._excluded: _Floats | None = None  # then: infinity for rows that are no candidates, and 0 for the others

    def add(self, name: str, slot: int, seed: int) -> None:
        """Add a replica, which costs nothing yet.

        Args:
            name: of the replica.
            slot: in KVIndex.
            seed: 64 bits that differ from those of other replicas, and are the same in every ingress.
        """
        if (missing := slot + 1 - len(self.names)) > 0:
            self._columns = [np.pad(column, (0, missing)) for column in self._columns]
            self._seeds = np.pad(self._seeds, (0, missing))
            self.names += [""] * missing
        self.names[slot], self._rows[name] = name, slot
        self._seeds[slot] = seed
        for column in self._columns:
            column[slot] = 0.0
        self._candidates = None

    def remove(self, name: str) -> None:
        """Remove a replica."""
        row = self._rows.pop(name)
        self.names[row] = ""
        self._last.discard(row)
        self._candidates = None

    def update(self, name: str, cost: ReplicaCost, *, ranks_last: bool) -> None:
        """Take over the cost of a replica."""
        row = self._rows[name]
        for column, number in zip(self._columns, cost.numbers, strict=True):
            column[row] = number
        if ranks_last:
            self._last.add(row)
        else:
            self._last.discard(row)

    def knows(self, candidates: Sequence[str]) -> bool:
        """Whether all of some replicas have a row."""
        return candidates is self._candidates or self._rows.keys() >= set(candidates)

    def costs(
        self, candidates: Sequence[str], prompt: PromptBlocks, num_cached_blocks: _Floats | None, prices: Prices
    ) -> _Floats:
        """Return the cost of a prompt in each row, infinity for rows that are no candidates.

        Args:
            candidates: names of replicas that have rows. The same tuple again is not looked up again.
            prompt: the prompt.
            num_cached_blocks: how many leading blocks of it each row has cached; None: no row has any.
            prices: what is the same on all replicas.
        """
        if candidates is not self._candidates:
            self._excluded = self._exclude_others(candidates)
            self._candidates = candidates if isinstance(candidates, tuple) else None
        costs = prompt_costs(self._columns, prompt, num_cached_blocks, prices)
        if self._excluded is not None:
            costs += self._excluded
        return costs

    @property
    def seconds_per_token(self) -> _Floats:
        """Seconds that each row takes to compute a prompt token."""
        return self._columns[1]

    def _exclude_others(self, candidates: Sequence[str]) -> _Floats | None:
        rows = {self._rows[name] for name in candidates}
        if len(rows) == len(self.names):
            return None
        excluded = np.full(len(self.names), np.inf)
        excluded[list(rows)] = 0.0
        return excluded

    def held(self, num_blocks: HeldBlocks | Mapping[str, int]) -> _Floats | None:
        """Return how many blocks each row holds; None: no row holds any."""
        if not num_blocks:
            return None
        if isinstance(num_blocks, HeldBlocks):
            return num_blocks.by_slot(len(self.names))
        held = np.zeros(len(self.names))
        for name, number in num_blocks.items():
            held[self._rows[name]] = number
        return held

    def tiers(self, avoid: Collection[str]) -> npt.NDArray[np.int8] | None:
        """Return 0 for usual rows, 1 for those that rank last, 2 for those to avoid; None if all are usual."""
        if not avoid and not self._last:
            return None
        tiers = np.zeros(len(self.names), np.int8)
        tiers[list(self._last)] = 1
        tiers[[self._rows[name] for name in avoid if name in self._rows]] = 2
        return tiers

    def rendezvous(self, rows: Rows, block: int) -> int:
        """Return which of some rows has the highest hash with a block: every ingress finds the same replica."""
        hashes = (self._seeds[rows] ^ np.uint64(block & _MASK_64)) * _GOLDEN_RATIO_64
        return int(rows[hashes.argmax()])
