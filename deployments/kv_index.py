"""KVIndex: which replica is thought to hold which KV blocks.

A bounded map from chained block hashes to replicas. A hash stands for a whole prefix, so the longest match is the
deepest block that a replica holds in an unbroken run from the first. It knows neither Ray nor time; whoever owns it
says what was stored, removed or cleared: today the router, from what it dispatched.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

__all__ = ["KVIndex"]


class KVIndex:
    """Block hash -> replicas, least recently stored block evicted first.

    Args:
        max_blocks: entries kept at most; None is unbounded, for a feed that removes what is gone.
    """

    def __init__(self, max_blocks: int | None = None) -> None:
        self._holders: OrderedDict[int, set[str]] = OrderedDict()
        self._blocks: defaultdict[str, set[int]] = defaultdict(set)
        self.max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, replica: str, hashes: Sequence[int]) -> None:
        """Record that ``replica`` holds ``hashes``, given in the order of the prefix."""
        for block in reversed(hashes):  # the first block becomes the youngest, so prefixes outlive their suffixes
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        self._blocks[replica].update(hashes)
        while self.max_blocks is not None and len(self._holders) > self.max_blocks:
            block, holders = self._holders.popitem(last=False)
            for holder in holders:
                self._forget(holder, block)

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that ``replica`` has evicted ``hashes``."""
        for block in hashes:
            self._forget(replica, block)
            self._discard_holder(block, replica)

    def cleared(self, replica: str) -> None:
        """Record that ``replica`` holds nothing any more: it has restarted or is gone."""
        for block in self._blocks.pop(replica, ()):
            self._discard_holder(block, replica)

    def longest_prefix(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return for each replica that holds the first block how many leading blocks it holds in a row."""
        depths: dict[str, int] = {}
        unbroken: set[str] | None = None
        for depth, block in enumerate(hashes, start=1):
            holders = self._holders.get(block)
            if holders is None:
                break
            unbroken = set(holders) if unbroken is None else unbroken & holders
            if not unbroken:
                break
            depths.update(dict.fromkeys(unbroken, depth))
        return depths

    def _forget(self, replica: str, block: int) -> None:
        blocks = self._blocks[replica]
        blocks.discard(block)
        if not blocks:
            del self._blocks[replica]

    def _discard_holder(self, block: int, replica: str) -> None:
        holders = self._holders.get(block)
        if holders is not None:
            holders.discard(replica)
            if not holders:
                del self._holders[block]
