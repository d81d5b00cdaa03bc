"""The cache of a simulated replica, and the hit rates of ideal caches, which bound every policy."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from benchmarks.routing.traces import BLOCK_SIZE, Request

__all__ = ["BlockCache", "infinite_bound", "pooled_bound"]


class BlockCache:
    """An LRU cache of blocks that evicts suffixes before prefixes and never a block that a running request uses."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._uses: Counter[int] = Counter()  # cached and used
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unused, least recently used first

    def __len__(self) -> int:
        return len(self._uses) + len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._uses or block in self._idle

    def __iter__(self) -> Iterator[int]:
        yield from self._uses
        yield from self._idle

    @property
    def num_used(self) -> int:
        """Blocks that running requests use."""
        return len(self._uses)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks are cached."""
        for depth, block in enumerate(hashes):
            if block not in self:
                return depth
        return len(hashes)

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Take blocks for a request, cached or not; return the evicted blocks."""
        for block in hashes:
            self._idle.pop(block, None)
            self._uses[block] += 1
        evicted = []
        while len(self) > self.max_blocks and self._idle:
            evicted.append(self._idle.popitem(last=False)[0])
        return evicted

    def release(self, hashes: Sequence[int]) -> None:
        """Release a request's blocks: they stay cached, the first one for longest."""
        for block in reversed(hashes):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._idle[block] = None


def infinite_bound(requests: Sequence[Request]) -> float:
    """Return the share of prompt tokens that a cache without a limit would hit."""
    return pooled_bound(requests, max_blocks=1 << 60)


def pooled_bound(requests: Sequence[Request], max_blocks: int) -> float:
    """Return the share of prompt tokens that one LRU cache of ``max_blocks`` would hit, if prefills took no time."""
    cache, hit = BlockCache(max_blocks), 0
    for request in requests:
        hit += min(cache.match(request.hashes) * BLOCK_SIZE, request.input_tokens - 1)
        cache.use(request.hashes)
        cache.release(request.hashes)
    return hit / sum(request.input_tokens for request in requests)
