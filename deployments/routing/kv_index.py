"""KVIndex: which replica holds which KV blocks, as far as one ingress knows.

Two kinds of knowledge are kept apart. *Confirmed* is what a replica's events said; only they take it back. *Assumed* is
what was dispatched to a replica and will be computed there: an event takes over from it, or it expires.

    _masks      block hash -> bits of the replicas that hold it, confirmed or assumed
    _holdings   replica    -> its bit, its confirmed and its assumed blocks

A hash stands for a whole prefix, and engines evict suffixes before prefixes, so what a replica holds of a prompt is an
unbroken run from its first block. ``depths`` relies on that and looks where runs end, not at every block. Should a run
have a hole after all (a lost event), a depth is a wrong guess, and so the routing that follows from it, nothing worse.

It knows neither Ray nor a clock nor threads: whoever owns it says what happened, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from math import inf

__all__ = ["KVIndex"]

_MAX_NAMED_MASKS = 4096


@dataclass(slots=True)
class _Holdings:
    """What one replica holds. Both maps are in the order in which blocks came, the oldest first."""

    bit: int
    confirmed: dict[int, None] = field(default_factory=dict)
    assumed: dict[int, float] = field(default_factory=dict)  # block -> when the assumption ends


class KVIndex:
    """Block hash -> replicas. Bounded by what the replicas hold, and what is assumed of them."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._holdings: dict[str, _Holdings] = {}
        self._slots: list[str | None] = []  # bit number -> replica; a free one is used again
        self._named: dict[int, tuple[str, ...]] = {}  # mask -> replicas, since few masks recur often
        self._expiries: list[tuple[float, int, str, Sequence[int]]] = []  # a heap; the number breaks ties
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._masks)

    def add_replica(self, name: str) -> None:
        """Begin to keep what ``name`` holds: nothing yet."""
        if name in self._holdings:
            return
        if None not in self._slots:
            self._slots.append(None)
        slot = self._slots.index(None)
        self._slots[slot] = name
        self._holdings[name] = _Holdings(1 << slot)
        self._named.clear()

    def remove_replica(self, name: str) -> None:
        """Forget ``name`` and everything that it held."""
        self.cleared(name)
        if self._holdings.pop(name, None) is not None:
            self._slots[self._slots.index(name)] = None
            self._named.clear()

    # --- confirmed, from events; of a replica that has gone meanwhile they come late and do nothing -----------------

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that ``replica`` holds ``hashes``."""
        if (holdings := self._holdings.get(replica)) is not None:
            self._hold(holdings, hashes)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that ``replica`` has evicted ``hashes``."""
        if (holdings := self._holdings.get(replica)) is None:
            return
        for block in hashes:
            holdings.confirmed.pop(block, None)
            holdings.assumed.pop(block, None)
            self._unmask(holdings.bit, block)

    def cleared(self, replica: str) -> None:
        """Record that ``replica`` holds nothing any more, neither what it said nor what was assumed."""
        if (holdings := self._holdings.get(replica)) is None:
            return
        for blocks in (holdings.confirmed, holdings.assumed):
            for block in blocks:
                self._unmask(holdings.bit, block)
            blocks.clear()

    def blocks(self, replica: str) -> frozenset[int]:
        """Return the confirmed blocks of ``replica``."""
        holdings = self._holdings.get(replica)
        return frozenset(holdings.confirmed) if holdings is not None else frozenset()

    # --- assumed, from dispatches ----------------------------------------------------------------------------------

    def assume(self, replica: str, hashes: Sequence[int], expires_at: float) -> None:
        """Assume that ``replica`` will hold ``hashes``, a prompt's blocks in order, until ``expires_at`` at most.

        They become its youngest assumed blocks, the first of them the youngest: prefixes outlive their suffixes.
        """
        if (holdings := self._holdings.get(replica)) is None:
            return
        tail = hashes[_run(hashes, lambda block: block in holdings.confirmed) :]
        known = _run(tail, lambda block: block in self._masks)
        if not self._masks.keys().isdisjoint(tail[known:]):
            known = len(tail)
        new = tail[known:]  # to everybody, as most of a long prompt is: no need to look at each block
        holdings.assumed.update(dict.fromkeys(reversed(new), expires_at))
        self._masks.update(dict.fromkeys(new, holdings.bit))
        for block in reversed(tail[:known]):
            if block not in holdings.confirmed:
                holdings.assumed.pop(block, None)  # it goes to the young end
                holdings.assumed[block] = expires_at
                self._masks[block] = self._masks.get(block, 0) | holdings.bit
        if tail and expires_at != inf:
            heappush(self._expiries, (expires_at, next(self._numbers), replica, tail))

    def expire(self, now: float) -> None:
        """End the assumptions whose time has come."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, replica, hashes = heappop(self._expiries)
            if (holdings := self._holdings.get(replica)) is None:
                continue
            for block in hashes:
                if holdings.assumed.get(block, inf) <= now:
                    del holdings.assumed[block]
                    self._unmask(holdings.bit, block)

    def trim(self, replica: str, max_blocks: int) -> None:
        """Keep the ``max_blocks`` youngest assumed blocks of ``replica``: a guess at what an LRU cache would hold."""
        if (holdings := self._holdings.get(replica)) is None:
            return
        for block in list(islice(holdings.assumed, max(0, len(holdings.assumed) - max_blocks))):
            del holdings.assumed[block]
            self._unmask(holdings.bit, block)

    def doubt(self, replica: str) -> None:
        """Turn what was confirmed of ``replica`` into assumptions without an end, older than those that it has."""
        if (holdings := self._holdings.get(replica)) is not None:
            guesses = (*holdings.confirmed, *holdings.assumed)
            holdings.confirmed, holdings.assumed = {}, dict.fromkeys(guesses, inf)

    # --- looking up ------------------------------------------------------------------------------------------------

    def depths(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of a prompt each replica holds, for those that hold any.

        Finds by halving where the first of them leaves, goes on from there with those that are left: about log2(blocks)
        look-ups for each different depth.
        """
        depths: dict[str, int] = {}
        get, size = self._masks.get, len(hashes)
        holders = get(hashes[0], 0) if hashes else 0
        low = 0
        while holders:
            high = size  # all holders hold block `low`, and not all of them block `high`, if there is one
            while high - low > 1:
                middle = (low + high) >> 1
                if get(hashes[middle], 0) & holders == holders:
                    low = middle
                else:
                    high = middle
            staying = get(hashes[high], 0) & holders if high < size else 0
            depths.update(dict.fromkeys(self._names(holders ^ staying), high))
            holders, low = staying, high
        return depths

    def depth(self, replica: str, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt one replica holds."""
        if (holdings := self._holdings.get(replica)) is None:
            return 0
        return _run(hashes, lambda block: self._masks.get(block, 0) & holdings.bit != 0)

    def _names(self, mask: int) -> tuple[str, ...]:
        names = self._named.get(mask)
        if names is None:
            if len(self._named) >= _MAX_NAMED_MASKS:
                self._named.clear()
            names = tuple(name for slot, name in enumerate(self._slots) if name is not None and mask >> slot & 1)
            self._named[mask] = names
        return names

    def _hold(self, holdings: _Holdings, hashes: Iterable[int]) -> None:
        confirmed, assumed, masks, bit = holdings.confirmed, holdings.assumed, self._masks, holdings.bit
        for block in hashes:
            confirmed[block] = None
            assumed.pop(block, None)
            masks[block] = masks.get(block, 0) | bit

    def _unmask(self, bit: int, block: int) -> None:
        rest = self._masks.get(block, 0) & ~bit
        if rest:
            self._masks[block] = rest
        else:
            self._masks.pop(block, None)


def _run(hashes: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Return how many leading blocks are held, by halving."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if holds(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low
