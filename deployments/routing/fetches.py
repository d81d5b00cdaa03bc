"""Fetches: what it costs a replica to fetch a part of a prompt's KV instead of computing it, in seconds as in cost.py.

A replica that holds the beginning of a prompt can fetch ``k`` further tokens, from storage or from a peer, and compute
the rest:

    cost    = max(queue, T) + (1 + price) * prefill + min(1, reuse) * k / P + decode / F
    T       = latency + k * seconds per token of that source
    prefill = uncached tokens / P, less k / P

The request waits for the fetch outside the queue, so the engine computes other prompts meanwhile: what takes no longer
than the queue costs nothing, and what takes longer costs this request alone. Fetched blocks evict others, as computed
ones do. Without that part of the price, replicas whose caches are full would fill them with copies of each other's.

The cost is linear in ``k`` on both sides of ``T = queue``, so it is lowest at no tokens, at all that the source holds,
or at those that come while the request would queue. Nothing is fetched from a source that is slower than computing:
engines do not wait that long.

Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from deployments.routing.cost import Fetch, Holder, Prices, PromptBlocks, ReplicaCost
from deployments.routing.source_rates import FetchRate, SourceRates
from engine.kv.events import StorageName

__all__ = ["Sources", "best_fetch", "saved_per_block"]

_GUESSED_LATENCY_S = 0.05
_GUESSED_SHARE = 0.5  # of the time that computing takes


class Sources(NamedTuple):
    """From where replicas can fetch the beginning of one prompt."""

    rates: SourceRates
    holders: Sequence[Holder] = ()  # those that hold the most first
    takers: Collection[str] = ()  # replicas that can fetch from them
    stored: Mapping[StorageName, Mapping[str, int]] = {}  # replica -> leading blocks, if this storage is counted too
    are_divisible: bool = True  # a part of what a source holds is worth something
    guesses: bool = False  # a peer of an unknown rate is taken to be twice as fast as computing

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.holders or self.stored)

    @property
    def max_blocks(self) -> int:
        """The most leading blocks that any of them holds."""
        held = [holder.num_blocks for holder in self.holders]
        for of_storage in self.stored.values():
            held += of_storage.values()
        return max(held, default=0)

    def options(
        self, name: str, replica: ReplicaCost, num_cached: int
    ) -> Iterator[tuple[Holder | StorageName, int, FetchRate]]:
        """Yield (peer or storage, blocks that it holds, rate) of what holds more than a replica's memory."""
        for storage, stored in self.stored.items():
            num_blocks = stored.get(name, 0)
            if num_blocks > num_cached and (rate := self.rates.get(name, storage)) is not None:
                yield storage, num_blocks, rate
        for holder in self.holders if name in self.takers else ():
            if holder.num_blocks > num_cached and holder.name != name:
                rate = self.rates.get(name, holder.endpoint)
                if rate is None and self.guesses:
                    rate = FetchRate(_GUESSED_LATENCY_S, _GUESSED_SHARE * replica.seconds_per_token)
                if rate is not None:
                    yield holder, holder.num_blocks, rate


def best_fetch(
    name: str, replica: ReplicaCost, prompt: PromptBlocks, num_cached: int, sources: Sources, prices: Prices
) -> Fetch | None:
    """Return the fetch that saves a replica the most; None if no fetch costs less than computing.

    Args:
        name: of the replica.
        replica: its cost.
        prompt: the prompt.
        num_cached: leading blocks of the prompt that the replica's memory holds.
        sources: of the prompt.
        prices: what is the same on all replicas.
    """
    size, queue_s = prompt.block_size, replica.queue_s
    computed_s = replica.seconds_per_token * size
    saved_s = saved_per_block(prompt, prices) * replica.seconds_per_token
    limit = max(0, prompt.num_tokens - 1) // size  # the last token is computed in any case
    best, best_saved_s = None, 0.0
    for source, num_held, (latency_s, seconds_per_token) in sources.options(name, replica, num_cached):
        number, block_s = min(num_held, limit) - num_cached, seconds_per_token * size
        if number <= 0 or block_s >= computed_s:
            continue
        saved = number * saved_s - max(0.0, latency_s + number * block_s - queue_s)
        hidden = int((queue_s - latency_s) / block_s) if sources.are_divisible else 0
        if 0 < hidden < number and hidden * saved_s >= saved:
            number, saved = hidden, hidden * saved_s
        if saved > best_saved_s:
            best, best_saved_s = (source, number, latency_s + number * block_s), saved
    if best is None:
        return None
    source, number, seconds = best
    evicted_s = prices.memory * computed_s * number
    return Fetch(source, num_cached + number, number, seconds, evicted_s, best_saved_s)


def saved_per_block(prompt: PromptBlocks, prices: Prices) -> float:
    """Return what a block saves that is fetched in no time, for a replica that computes a token in one second."""
    return (1 + prices.prefill - prices.memory) * prompt.block_size
