"""Copies: KV of other engines that is read before a request needs it, because its holder may be lost.

    add() -> queue, a few texts -> pages are reserved and filled, as for a request -> published, unpinned

Published copies are host pages like others: hit by requests, reported to routers, evicted when they are the least
recently used. A copy has the lowest priority: no request waits for it, few run at a time, and what is late, has no
room, or is being copied already is dropped. A later order for the same text copies what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal, TypeAlias

from engine.kv.tiers.arrivals import Arrival, Arrivals
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.fetch_plan import FetchPlan
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.source import PrefixSource, WantedPrefix, begin_fetch
from engine.kv.tiers.step_clock import StepClock
from engine.kv.tiers.tier_meter import TierMeter
from engine.request import KVSource

__all__ = ["Copies", "CopyOrder", "CopyReason"]

CopyReason: TypeAlias = Literal["replication", "drain", "warm_up"]

MAX_RUNNING = 2
MAX_QUEUED = 64  # the oldest is dropped for another one
LATE_S = 5.0  # in the queue; by then the text has grown, or its holder has ended


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """A text whose KV is to be copied.

    Attributes:
        token_ids: of the text; its full blocks are copied, as far as the source has them.
        cache_key: of its requests.
        source: holds the KV of its first ``num_tokens`` tokens.
        reason: why, the label of a metric.
    """

    token_ids: Sequence[int]
    cache_key: str
    source: KVSource
    reason: CopyReason


class Copies:
    """The copies of one engine. The engine's thread calls all methods.

    Args:
        pages: of the host pools.
        arrivals: reserves and publishes pages.
        steps: of the engine.
        new_chain: returns the chain of token ids under a cache key.
        meter: counts what is copied.
        on_changed: called after blocks have been published between two steps.
        clock: monotonic seconds.

    Attributes:
        peers: reads from other engines; None: not yet.
    """

    def __init__(
        self,
        pages: HostPages,
        arrivals: Arrivals,
        steps: StepClock,
        new_chain: Callable[[list[int], str], TokenChain],
        meter: TierMeter,
        on_changed: Callable[[], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.peers: PrefixSource | None = None
        self._pages = pages
        self._arrivals = arrivals
        self._steps = steps
        self._new_chain = new_chain
        self._meter = meter
        self._on_changed = on_changed
        self._clock = clock
        self._queue: deque[tuple[CopyOrder, float]] = deque()
        self._running = set[bytes]()  # digests of the first block that each reads

    def add(self, order: CopyOrder) -> None:
        """Copy what memory lacks of a text, now or soon."""
        if self.peers is None or not self._pages.blocks.enable_prefix_caching:
            return
        if len(self._queue) == MAX_QUEUED:
            self._queue.popleft()
            self._meter.failed(self.peers.name, "late")
        self._queue.append((order, self._clock()))
        self._go_on()

    def _go_on(self) -> None:
        """Start the next copies, if few run."""
        while self._queue and len(self._running) < MAX_RUNNING:
            order, since = self._queue.popleft()
            assert self.peers is not None
            if self._clock() - since > LATE_S:
                self._meter.failed(self.peers.name, "late")
            elif self.peers.may_help(order.source):
                self._start(order, self.peers)

    def _start(self, order: CopyOrder, peers: PrefixSource) -> None:
        """Read what memory lacks of a text, unless its next block is being read."""
        chain = self._new_chain(list(order.token_ids), order.cache_key)
        plan = FetchPlan(self._pages, chain, chain)
        if plan.first_block >= plan.last_block or (digest := chain.digest(plan.first_block)) in self._running:
            return
        wanted = WantedPrefix("", chain, plan.first_block, order.source)
        if not (kinds := plan.kinds(peers, wanted)):
            return

        def finished(arrival: Arrival, error: str | None) -> None:
            self._running.remove(digest)
            self._finish(arrival, order, error)

        arrival = self._arrivals.reserve(chain, plan.first_block, kinds, finished, keep=plan.match)
        if arrival is None:
            self._meter.failed(peers.name, "full")
            return
        self._running.add(digest)
        self._steps.call_after(lambda: begin_fetch(peers, wanted, arrival))

    def _finish(self, arrival: Arrival, order: CopyOrder, error: str | None) -> None:
        """Publish what has come, and start the next copies."""
        assert self.peers is not None
        num_blocks = max(0, self._arrivals.publish(arrival) - arrival.first_block)
        self._arrivals.release(arrival)
        num_tokens = num_blocks * arrival.chain.block_size
        self._meter.copied_ahead(order.reason, self.peers.name, num_tokens=num_tokens, num_bytes=arrival.num_bytes)
        if error is not None:
            self._meter.failed(self.peers.name, error)
        if num_blocks:
            self._on_changed()
        self._go_on()
