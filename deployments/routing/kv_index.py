"""KVIndex: which replica holds which KV blocks, as far as one ingress knows.

A block is *confirmed* if an event of the replica reported it; only another event or a snapshot removes it. A block is
*assumed* if a prompt that needs it was dispatched to the replica; an event confirms it, or the assumption expires.

    _masks      block hash -> bit mask of the replicas that hold the block, confirmed or assumed
    _holdings   replica    -> its bit, its confirmed blocks and its assumed blocks

A hash identifies a whole prefix, and engines evict suffixes before prefixes, so the blocks that a replica holds of a
prompt are an unbroken run from its first block. ``num_cached_blocks`` relies on that: it searches for the ends of the
runs instead of looking at every block. If a lost event leaves a hole in a run, a number is wrong and the routing
decision is worse; nothing else depends on it.

It knows neither Ray nor clocks, and takes no lock: the caller holds that of RoutingState.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from math import inf

from deployments.routing.held_blocks import HeldBlocks

__all__ = ["KVIndex"]


@dataclass(slots=True)
class _Holdings:
    """The blocks of one replica. Both maps are in insertion order, the oldest block first."""

    bit: int
    confirmed: dict[int, None] = field(default_factory=dict)
    assumed: dict[int, float] = field(default_factory=dict)  # block -> when the assumption expires


class KVIndex:
    """Maps block hashes to replicas. Its size is bounded by the replicas' caches plus the assumptions."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._holdings: dict[str, _Holdings] = {}
        self._names: list[str | None] = []  # by slot, the number of the replica's bit; None is free for reuse
        self._expiries: list[tuple[float, int, str, Sequence[int]]] = []  # a heap; the int breaks ties
        self._tie_breaker = count()

    def __len__(self) -> int:
        return len(self._masks)

    def add_replica(self, name: str) -> int:
        """Add a replica that holds nothing yet; return its slot, the lowest that was free."""
        if (known := self._holdings.get(name)) is not None:
            return known.bit.bit_length() - 1
        if None not in self._names:
            self._names.append(None)
        slot = self._names.index(None)
        self._names[slot] = name
        self._holdings[name] = _Holdings(1 << slot)
        return slot

    def remove_replica(self, name: str) -> None:
        """Remove a replica and all its blocks."""
        self.cleared(name)
        if self._holdings.pop(name, None) is not None:
            self._names[self._names.index(name)] = None

    # --- confirmed blocks, from events; events of unknown replicas are late and ignored ------------------------------

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that ``replica`` holds ``hashes``."""
        if (holdings := self._holdings.get(replica)) is not None:
            self._confirm(holdings, hashes)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that ``replica`` has evicted ``hashes``."""
        if (holdings := self._holdings.get(replica)) is None:
            return
        for block in hashes:
            holdings.confirmed.pop(block, None)
            holdings.assumed.pop(block, None)
            self._unmask(holdings.bit, block)

    def cleared(self, replica: str) -> None:
        """Remove all blocks of ``replica``, confirmed and assumed."""
        if (holdings := self._holdings.get(replica)) is None:
            return
        for blocks in (holdings.confirmed, holdings.assumed):
            for block in blocks:
                self._unmask(holdings.bit, block)
            blocks.clear()

    def is_assumed(self, replica: str, block: int) -> bool:
        """Whether ``replica`` is taken to hold a block that no event has reported, or whose events are lost."""
        holdings = self._holdings.get(replica)
        return holdings is not None and block in holdings.assumed

    def num_confirmed_blocks(self, replica: str, hashes: Sequence[int], num_blocks: int) -> int:
        """Return how many of the first ``num_blocks`` blocks of a prompt, which a replica holds, events reported."""
        if (holdings := self._holdings.get(replica)) is None or not num_blocks:
            return 0
        if hashes[num_blocks - 1] in holdings.confirmed:
            return num_blocks
        return _num_leading(hashes[:num_blocks], lambda block: block in holdings.confirmed)

    def blocks(self, replica: str) -> frozenset[int]:
        """Return the confirmed blocks of ``replica``."""
        holdings = self._holdings.get(replica)
        return frozenset(holdings.confirmed) if holdings is not None else frozenset()

    # --- assumed blocks, from dispatches -----------------------------------------------------------------------------

    def assume(self, replica: str, hashes: Sequence[int], expires_at: float) -> None:
        """Assume until ``expires_at`` that ``replica`` holds ``hashes``, the blocks of a prompt in order.

        They become the youngest assumed blocks, the prompt's first block the youngest: ``trim`` removes suffixes first.
        """
        if (holdings := self._holdings.get(replica)) is None:
            return
        tail = hashes[_num_leading(hashes, lambda block: block in holdings.confirmed) :]
        known = _num_leading(tail, lambda block: block in self._masks)
        if not self._masks.keys().isdisjoint(tail[known:]):
            known = len(tail)
        new = tail[known:]  # held by no replica, as most of a long prompt is: no look-up for each block
        holdings.assumed.update(dict.fromkeys(reversed(new), expires_at))
        self._masks.update(dict.fromkeys(new, holdings.bit))
        for block in reversed(tail[:known]):
            if block not in holdings.confirmed:
                holdings.assumed.pop(block, None)  # reinsert it as the youngest
                holdings.assumed[block] = expires_at
                self._masks[block] = self._masks.get(block, 0) | holdings.bit
        if tail and expires_at != inf:
            heappush(self._expiries, (expires_at, next(self._tie_breaker), replica, tail))

    def expire(self, now: float) -> None:
        """Remove the assumed blocks that have expired."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, replica, hashes = heappop(self._expiries)
            if (holdings := self._holdings.get(replica)) is None:
                continue
            for block in hashes:
                if holdings.assumed.get(block, inf) <= now:
                    del holdings.assumed[block]
                    self._unmask(holdings.bit, block)

    def trim(self, replica: str, max_blocks: int) -> None:
        """Keep only the ``max_blocks`` youngest assumed blocks of ``replica``, as an LRU cache would."""
        if (holdings := self._holdings.get(replica)) is None:
            return
        for block in list(islice(holdings.assumed, max(0, len(holdings.assumed) - max_blocks))):
            del holdings.assumed[block]
            self._unmask(holdings.bit, block)

    def mark_unconfirmed(self, replica: str) -> None:
        """Turn the confirmed blocks of ``replica`` into assumed ones that never expire, older than the others."""
        if (holdings := self._holdings.get(replica)) is not None:
            guesses = (*holdings.confirmed, *holdings.assumed)
            holdings.confirmed, holdings.assumed = {}, dict.fromkeys(guesses, inf)

    # --- look-ups ----------------------------------------------------------------------------------------------------

    def num_cached_blocks(self, hashes: Sequence[int]) -> HeldBlocks:
        """Return how many leading blocks of a prompt each replica holds; it is to be read before the next change.

        A binary search finds the first block that not all holders hold, and is repeated from there with the remaining
        holders: about log2(len(hashes)) look-ups for each distinct result.
        """
        groups: list[tuple[int, int]] = []
        get, size = self._masks.get, len(hashes)
        holders = get(hashes[0], 0) if hashes else 0
        low = 0
        while holders:
            high = size  # invariant: all holders hold block `low`; not all hold block `high`, if it exists
            while high - low > 1:
                middle = (low + high) >> 1
                if get(hashes[middle], 0) & holders == holders:
                    low = middle
                else:
                    high = middle
            staying = get(hashes[high], 0) & holders if high < size else 0
            if leaving := holders ^ staying:
                groups.append((leaving, high))
            holders, low = staying, high
        return HeldBlocks(groups, self._names)

    def _confirm(self, holdings: _Holdings, hashes: Iterable[int]) -> None:
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


def _num_leading(hashes: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Return for how many leading blocks ``holds`` is true, by binary search."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if holds(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low
