"""Pages that are asked for come, and only these; what the source lacks ends the transfer early."""

from __future__ import annotations

import random
from typing import Any

from deployments.transport.pages.leases import MAX_LEASES
from tests.deployments.transport.pages.fakes import PROMPT, Lender, Pair, Sink, pair
from tests.waiting import until

SIZES = [4096, 96, 40]  # bytes of a page of each of three kinds


def random_pages(num_blocks: int, sizes: list[int] = SIZES, seed: int = 0) -> list[list[bytes | None]]:
    rng = random.Random(seed)
    return [[rng.randbytes(size) for size in sizes] for _ in range(num_blocks)]


def sink_for(pages: list[list[bytes | None]], first_block: int = 0) -> Sink:
    return Sink(first_block, [[None if page is None else len(page) for page in of] for of in pages[first_block:]])


def released(both: Pair) -> bool:
    return until(lambda: both.lender.num_released == len(both.lender.leases), "all leases are released")


def test_the_pages_come_as_they_are() -> None:
    pages = random_pages(10)
    with pair(Lender(pages)) as both:
        for first in (0, 3, 9):
            sink = sink_for(pages, first)
            assert both.fetch(sink) is None
            assert sink.pages() == pages[first:]
        assert both.server.num_connections == 1  # it was kept
        assert both.lender.num_sent == 4 * (10 + 7 + 1)
        sizes = [sum(len(page) for of in pages[first:] for page in of if page is not None) for first in (0, 3, 9)]
        recent = both.client.log.recent()
        assert [(transfer.tokens, transfer.bytes) for transfer in recent] == list(zip((40, 28, 4), sizes, strict=True))
        assert {transfer.endpoint for transfer in recent} == {both.server.address.endpoint}
        assert released(both)
        assert not both.rejections


def test_many_small_pages_and_large_ones() -> None:
    prompt = list(range(4 * 3000))
    small = random_pages(3000, [7, 1, 3])
    with pair(Lender(small, prompt)) as both:
        assert both.server._max_tokens < len(prompt)
        sink = sink_for(small[:2000])
        assert both.fetch(sink, prompt[:8000]) is None
        assert sink.pages() == small[:2000]
    large = random_pages(3, [9_000_001])
    with pair(Lender(large)) as both:
        sink = sink_for(large)
        assert both.fetch(sink) is None
        assert sink.pages() == large
        rate = both.client.peer_rates.get(both.server.address.endpoint)
        assert rate is not None
        assert rate.num_transfers == 1
        assert rate.bytes_per_s > 0 < rate.latency_s


def test_kinds_that_are_not_wanted_or_not_there() -> None:
    pages = random_pages(4)
    pages[1][1] = None
    pages[2] = [pages[2][0], None, None]
    with pair(Lender(pages)) as both:
        sink = Sink(0, [[4096, 96, None], [4096, 96, 40], [4096, None, 40], [None, 96, 40]])
        assert both.fetch(sink) is None
        assert sink.came == [[True, True, True], [True, False, True], [True, False, False], [True, True, True]]
        assert sink.memory[1][2] == pages[1][2]
        assert sink.memory[3][1] == pages[3][1]


def test_several_leases_make_one_transfer() -> None:
    lender = Lender(pages := random_pages(10))
    lender.lease_blocks = 3
    with pair(lender) as both:
        sink = sink_for(pages)
        assert both.fetch(sink) is None
        assert sink.pages() == pages
        assert len(lender.leases) == 4
        assert released(both)


class Cramped(Lender):
    """Has room for the pages of one lease at a time, as a small host pool has."""

    def lend(self, *args: Any, **kwargs: Any) -> None:
        if self.num_released < len(self.leases):
            args[3](None)
        else:
            super().lend(*args, **kwargs)


def test_a_host_pool_with_room_for_one_lease() -> None:
    lender = Cramped(pages := random_pages(10))
    lender.lease_blocks = 3
    with pair(lender) as both:
        sink = sink_for(pages)
        assert both.fetch(sink) is None
        assert sink.pages() == pages
        assert len(lender.leases) == 4


def test_a_long_prompt_takes_a_bounded_number_of_leases() -> None:
    prompt = list(range(4 * 400))
    lender = Lender(pages := random_pages(400, [16]), prompt)
    with pair(lender) as both:
        assert both.fetch(sink_for(pages), prompt) is None
        assert len(lender.leases) == MAX_LEASES
        assert released(both)


def test_what_the_source_lacks_is_gone() -> None:
    pages = random_pages(10)
    with pair(Lender(pages[:4])) as both:
        sink = sink_for(pages)
        assert both.fetch(sink) == "gone"
        assert sink.pages() == pages[:4]
        other = sink_for(pages)
        assert both.fetch(other, [1, *PROMPT[1:]]) == "gone"
        assert both.fetch(sink_for(pages), cache_key="another") == "gone"
        assert other.done == []
        assert both.client.may_help(both.source())  # it has done nothing wrong


def test_a_lease_that_expires_ends_the_transfer() -> None:
    lender = Lender(pages := random_pages(10))
    lender.lease_blocks = 5
    with pair(lender) as both:
        expire_after(lender, 1)
        sink = sink_for(pages)
        assert both.fetch(sink) == "gone"
        assert sink.pages() == pages[:5]
        assert released(both)


def expire_after(lender: Lender, num_leases: int) -> None:
    """Let the leases after the first ``num_leases`` expire before they can be read."""
    lend = lender.lend

    def expired(*args: object, **kwargs: object) -> None:
        lend(*args, **kwargs)  # type: ignore[arg-type]

    def with_expiry(chain: object, first: int, num: int, on_ready: object, *, timeout_s: float) -> None:
        def deliver(lease: object) -> None:
            if lease is not None and len(lender.leases) > num_leases:
                lease.is_valid = False  # type: ignore[attr-defined]
            on_ready(lease)  # type: ignore[operator]

        expired(chain, first, num, deliver, timeout_s=timeout_s)

    lender.lend = with_expiry  # type: ignore[method-assign, assignment]


def test_the_client_pulls_nothing_without_a_source() -> None:
    with pair(Lender(random_pages(1))) as both:
        assert not both.client.may_help(None)


def test_a_source_has_what_the_router_says() -> None:
    from engine.kv.tiers.source import WantedPrefix
    from tests.deployments.transport.pages.fakes import chain_of

    with pair(Lender(random_pages(10))) as both:
        wanted = WantedPrefix("r", chain_of(PROMPT), 0, both.source(num_tokens=11))
        assert [both.client.has(wanted, index, 0) for index in range(4)] == [True, True, False, False]
