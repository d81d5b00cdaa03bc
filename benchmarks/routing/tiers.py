"""TieredCache: the cache of a simulated replica with a host tier, and with blocks that other replicas read or send.

    device    an LRU cache of blocks, as without a host tier
    host      an LRU cache of the blocks that the device has evicted; a block that is used moves to the device

A block is in one of them. What both have evicted is gone. Blocks that a transfer reads are leased: neither evicts them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from benchmarks.routing.cache import BlockCache
from engine.observability.load import MAX_SOURCE_RATES, SourceRate

__all__ = ["PullRates", "TieredCache"]

_WEIGHT = 0.3  # of the latest pull in the mean


class TieredCache(BlockCache):
    """A cache of two tiers.

    Args:
        max_blocks: of the device.
        max_host_blocks: of the host; 0: there is no host tier.
    """

    def __init__(self, max_blocks: int, max_host_blocks: int = 0) -> None:
        super().__init__(max_blocks)
        self.max_host_blocks = max_host_blocks
        self._host: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._leases: Counter[int] = Counter()
        self._reserved = 0  # blocks for which room is kept, because they are on their way

    def __contains__(self, block: int) -> bool:
        return block in self._uses or block in self._idle or block in self._host

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        yield from self._host

    def num_on_host(self, hashes: Sequence[int]) -> int:
        """Return how many of the blocks would be loaded from the host."""
        return sum(block in self._host for block in hashes) if self._host else 0

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Take blocks for a request, cached or not; return the blocks that no tier holds any more."""
        for block in hashes:
            self._host.pop(block, None)
            self._idle.pop(block, None)
            self._uses[block] += 1
        return self._make_room()

    def reserve(self, num_blocks: int) -> list[int]:
        """Keep room for blocks that are on their way; return the blocks that no tier holds any more."""
        self._reserved += num_blocks
        return self._make_room()

    def receive(self, hashes: Sequence[int], num_reserved: int) -> list[int]:
        """Store blocks for which room was reserved, the first the youngest; return those that were new."""
        self._reserved -= num_reserved
        new = [block for block in hashes if block not in self]
        for block in reversed(new):
            (self._host if self.max_host_blocks else self._idle)[block] = None
        return new

    def lease(self, hashes: Sequence[int]) -> None:
        """Keep blocks until ``end_lease``; it counts as a use."""
        self._leases.update(hashes)
        for block in reversed(hashes):
            for tier in (self._idle, self._host):
                if block in tier:
                    tier.move_to_end(block)

    def end_lease(self, hashes: Sequence[int]) -> None:
        """End a lease."""
        self._leases -= Counter(hashes)

    def _make_room(self) -> list[int]:
        on_host = self.max_host_blocks > 0
        leaving = self._evict(self._idle, len(self._uses), self.max_blocks - (0 if on_host else self._reserved))
        if not on_host:
            return leaving
        self._host.update(dict.fromkeys(leaving))
        return self._evict(self._host, 0, self.max_host_blocks - self._reserved)

    def _evict(self, tier: OrderedDict[int, None], num_used: int, max_blocks: int) -> list[int]:
        evicted: list[int] = []
        for _ in range(len(tier)):
            if len(tier) + num_used <= max_blocks:
                break
            block = tier.popitem(last=False)[0]
            if self._leases[block]:
                tier[block] = None
            else:
                evicted.append(block)
        return evicted


class PullRates:
    """The pace of the pulls of a replica, as it reports it: exponential moving averages by source."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, float, int]] = {}  # source -> (latency, seconds per token, pulls)

    def record(self, source: str, latency_s: float, seconds_per_token: float) -> None:
        """Take in a pull: the seconds until it was on the wire, and then of each token."""
        latency, pace, number = self._rates.pop(source, (latency_s, seconds_per_token, 0))
        latency += _WEIGHT * (latency_s - latency)
        pace += _WEIGHT * (seconds_per_token - pace)
        self._rates[source] = latency, pace, number + 1  # the latest last

    def reported(self) -> tuple[SourceRate, ...]:
        """Return what a report says of them."""
        latest = list(self._rates.items())[-MAX_SOURCE_RATES:]
        return tuple(
            SourceRate(name, latency, 1 / max(1e-12, pace), number) for name, (latency, pace, number) in latest
        )
