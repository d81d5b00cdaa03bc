"""Fetching: requests whose prefix lies in a source wait, outside the scheduler, until its pages are in host memory.

    queue_request -> defer ... pages arrive, or the deadline passes ... scheduler.add -> admitted -> pages unpinned

A request waits at most about as long as its blocks would take to be computed. So a source that stalls makes it take
twice as long, at worst. What has arrived by then is used, and the rest is computed. Nothing is fetched that is expected
to take longer than computing it.

Requests with the same prefix, which arrive together, wait for one fetch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from engine.kv.tiers.arrivals import Arrival, Arrivals
from engine.kv.tiers.digests import TokenChain
from engine.kv.tiers.fetch_plan import FetchPlan
from engine.kv.tiers.host_pages import HostPages
from engine.kv.tiers.inbox import StepInbox
from engine.kv.tiers.source import PrefixSource, WantedPrefix, begin_fetch
from engine.kv.tiers.step_clock import StepClock
from engine.kv.tiers.tier_meter import TierMeter
from engine.sequence import SequenceGroup

__all__ = ["Fetching"]

DEFAULT_WAIT_S = 10.0  # before the engine has measured how fast it computes
LEAST_WAIT_S = 0.25  # in which a short prefix comes from a disk that sleeps
_SLACK = 1.25  # of the time that computing takes


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Fetch:
    """A request that waits for pages."""

    group: SequenceGroup
    source: PrefixSource
    arrival: Arrival
    digest: bytes  # of the first block that it waits for
    started: float
    followers: list[SequenceGroup] = field(default_factory=list)  # that wait for the same block


class Fetching:
    """The requests that wait for pages, and the pages that are kept until their requests start.

    The engine's thread calls all methods.

    Args:
        pages: the host pools.
        arrivals: reserves and publishes pages.
        inbox: of the engine's thread.
        steps: of the engine.
        new_chain: returns the chain of a request's tokens.
        start: queues a request.
        prefill_rate: returns the tokens a second that the engine computes; 0: not measured yet.
        meter: counts what is fetched.
        clock: monotonic seconds.

    Attributes:
        sources: of pages; of those that hold equally much, the first one is read.
    """

    def __init__(
        self,
        pages: HostPages,
        arrivals: Arrivals,
        inbox: StepInbox,
        steps: StepClock,
        new_chain: Callable[[SequenceGroup], TokenChain],
        start: Callable[[SequenceGroup], None],
        prefill_rate: Callable[[], float],
        meter: TierMeter,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.sources: list[PrefixSource] = []
        self._pages = pages
        self._arrivals = arrivals
        self._inbox = inbox
        self._steps = steps
        self._new_chain = new_chain
        self._start = start
        self._prefill_rate = prefill_rate
        self._meter = meter
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}  # by request
        self._followed: dict[str, _Fetch] = {}  # the fetch that another request waits for
        self._by_digest: dict[bytes, _Fetch] = {}
        self._kept: dict[str, Arrival] = {}  # by request, until it starts

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._fetches) + len(self._followed)

    def defer(self, group: SequenceGroup) -> bool:
        """Let a request wait for pages if a source has some that memory lacks; False: it is to be queued now."""
        sources = [source for source in self.sources if source.may_help(group.request.kv_source)]
        if not sources or group.wants_prompt_logprobs or not self._pages.blocks.enable_prefix_caching:
            return False
        chain = self._new_chain(group)
        plan = FetchPlan(self._pages, group.sequences[0], chain)
        if plan.first_block >= plan.last_block:
            return False
        digest = chain.digest(plan.first_block)
        if (leader := self._by_digest.get(digest)) is not None:
            leader.followers.append(group)
            self._followed[group.request_id] = leader
            return True
        wanted = WantedPrefix(group.request_id, chain, plan.first_block, group.request.kv_source)
        offers = [
            (kinds, source)
            for source in sources
            if (kinds := plan.kinds(source, wanted)) and self._pays(source, len(kinds) * chain.block_size)
        ]
        if not offers:
            return False
        kinds, source = max(offers, key=lambda offer: len(offer[0]))
        num_tokens = len(kinds) * chain.block_size
        arrival = self._arrivals.reserve(chain, plan.first_block, kinds, self._finished, keep=plan.match)
        if arrival is None:
            self._meter.failed(source.name, "full")
            return False
        fetch = _Fetch(group, source, arrival, digest, self._clock())
        self._fetches[group.request_id] = self._by_digest[digest] = fetch
        self._inbox.post_at(fetch.started + self._wait_s(num_tokens), partial(self._deadline, weakref.ref(fetch)))
        # Copies of launched steps may still read from these pages, or write to them.
        self._steps.call_after(lambda: begin_fetch(source, wanted, arrival))
        return True

    def cancel(self, group: SequenceGroup) -> bool:
        """Let a request that waits for pages be queued, because it ends; False if it does not wait."""
        if (fetch := self._fetches.get(group.request_id)) is not None:
            self._give_up(fetch, "cancelled")
            return True
        if (leader := self._followed.pop(group.request_id, None)) is not None:
            leader.followers.remove(group)
            self._start(group)
            return True
        return False

    def started(self, groups: Iterable[SequenceGroup]) -> None:
        """Unpin the pages of requests that have started or left."""
        if self._kept:
            for group in groups:
                if (arrival := self._kept.pop(group.request_id, None)) is not None:
                    self._arrivals.release(arrival)

    def _pays(self, source: PrefixSource, num_tokens: int) -> bool:
        """Whether fetching is expected to take less time than computing, or one of the two is not known."""
        seconds, rate = source.seconds(num_tokens), self._prefill_rate()
        return seconds is None or not rate or seconds <= num_tokens / rate

    def _wait_s(self, num_tokens: int) -> float:
        rate = self._prefill_rate()
        return max(LEAST_WAIT_S, _SLACK * num_tokens / rate) if rate else DEFAULT_WAIT_S

    def _finished(self, arrival: Arrival, error: str | None) -> None:
        """The source is done with an arrival; the request may have given up before."""
        fetch = next((fetch for fetch in self._fetches.values() if fetch.arrival is arrival), None)
        if fetch is not None:
            self._give_up(fetch, error)

    def _deadline(self, reference: weakref.ref[_Fetch]) -> None:
        if (fetch := reference()) is not None:  # else it has ended long ago
            self._give_up(fetch, "late")

    def _give_up(self, fetch: _Fetch, error: str | None) -> None:
        """Publish what has arrived, and queue the request and those that wait with it; once.

        Args:
            fetch: what ends.
            error: why it ends before all has come; None: all has come.
        """
        if self._fetches.get(fetch.group.request_id) is not fetch:
            return
        del self._fetches[fetch.group.request_id], self._by_digest[fetch.digest]
        arrival = fetch.arrival
        arrival.is_cancelled = True
        num_blocks = max(0, self._arrivals.publish(arrival) - arrival.first_block)
        self._meter.fetched(
            fetch.source.name,
            num_tokens=num_blocks * arrival.chain.block_size,
            num_bytes=arrival.num_bytes,
            seconds=self._clock() - fetch.started,
            is_late=error == "late",
        )
        if error not in (None, "cancelled"):
            self._meter.failed(fetch.source.name, error)
        self._kept[fetch.group.request_id] = arrival
        self._start(fetch.group)
        for group in fetch.followers:
            if self._followed.pop(group.request_id, None) is not None and not self.defer(group):
                self._start(group)
