"""What a fetch saves: the part of a prompt that comes from a disk or a peer while the request would queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.cost import Fetch, Holder, Prices, PromptBlocks, ReplicaCost, prompt_cost
from deployments.routing.fetches import Sources, best_fetch
from deployments.routing.source_rates import SourceRates
from engine.observability.load import SourceRate

SIZE = 16
PROMPT = PromptBlocks(10 * SIZE + 5, list(range(10)), SIZE)
TOKEN_S = 0.01  # to compute one
FREE = Prices()


def rates(tokens_per_s: float, latency_s: float = 0.0, *, of: str = "tcp://b:1") -> SourceRates:
    measured = SourceRates()
    measured.report("a", [SourceRate(of, latency_s, tokens_per_s)], now=0.0)
    return measured


def holder(num_blocks: int, name: str = "b") -> Holder:
    return Holder(name, f"tcp://{name}:1", "secret", num_blocks)


def replica(queue_s: float = 0.0) -> ReplicaCost:
    cost = ReplicaCost()
    cost.update(queued_tokens=round(queue_s / TOKEN_S), seconds_per_token=TOKEN_S)
    return cost


def fetch(sources: Sources, *, cached: int = 0, queue_s: float = 0.0, prices: Prices = FREE) -> Fetch | None:
    return best_fetch("a", replica(queue_s), PROMPT, cached, sources, prices)


def peers(
    num_blocks: int, tokens_per_s: float = 1_000.0, latency_s: float = 0.0, *, is_divisible: bool = True
) -> Sources:
    return Sources(rates(tokens_per_s, latency_s), [holder(num_blocks)], takers={"a"}, are_divisible=is_divisible)


def test_a_fast_peer_gives_all_that_it_holds() -> None:
    found = fetch(peers(8), cached=3)
    assert found is not None
    assert (found.num_blocks, found.num_fetched) == (8, 5)
    assert found.seconds == pytest.approx(5 * SIZE / 1_000)
    assert found.saved_s == pytest.approx(5 * SIZE * (TOKEN_S - 0.001))


def test_the_wait_for_a_fetch_and_the_queue_overlap() -> None:
    """Its 0.08 s pass while others are computed, so that all of what computing takes is saved."""
    found = fetch(peers(8), cached=3, queue_s=10.0)
    assert found is not None
    assert found.saved_s == pytest.approx(5 * SIZE * TOKEN_S)


def test_a_slower_source_gives_what_comes_while_the_request_would_queue() -> None:
    """After the queue a block takes 0.144 s and saves 0.16 s, less the 0.128 s that it costs others in evictions."""
    prices = Prices(0.8, 0.0, 0.8)
    sources = peers(10, tokens_per_s=SIZE / 0.144)
    whole, part = fetch(sources, prices=prices), fetch(sources, queue_s=0.5, prices=Prices(0.0, 0.0, 0.8))
    assert whole is not None
    assert whole.num_fetched == 10
    assert part is not None
    assert part.num_fetched == 3
    assert part.seconds <= 0.5
    assert fetch(sources, prices=Prices(0.0, 0.0, 0.8)) is None
    undivided = peers(10, tokens_per_s=SIZE / 0.144, is_divisible=False)
    assert fetch(undivided, queue_s=0.5, prices=Prices(0.0, 0.0, 0.8)) is None


def test_nothing_is_fetched_from_a_source_that_is_slower_than_computing() -> None:
    for queue_s in (0.0, 100.0):
        assert fetch(peers(5, tokens_per_s=99.0), queue_s=queue_s, prices=Prices(50.0)) is None
    late = peers(5, latency_s=0.9)
    assert fetch(late) is None
    assert fetch(late, queue_s=0.9) is not None


def test_the_last_token_is_computed_even_if_a_source_holds_all_blocks() -> None:
    prompt = PromptBlocks(10 * SIZE, list(range(10)), SIZE)
    found = best_fetch("a", replica(), prompt, 0, peers(10), FREE)
    assert found is not None
    assert found.num_blocks == 9


def test_the_disk_needs_no_peer_and_the_cheaper_of_both_is_taken() -> None:
    measured = rates(10_000.0, of="disk")
    measured.report("a", [SourceRate("tcp://b:1", 0.0, 1_000.0)], now=0.0)
    found = fetch(Sources(measured, [holder(8)], takers={"a"}, stored={"disk": {"a": 8}}))
    assert found is not None
    assert found.holder is None
    found = fetch(Sources(measured, [holder(8)], takers={"a"}, stored={"disk": {"a": 2}}))
    assert found is not None
    assert found.holder is not None
    found = fetch(Sources(measured, [holder(8)], stored={"disk": {"a": 2}}))  # it serves no pages: it cannot pull
    assert found is not None
    assert found.holder is None


def test_of_disk_and_shared_cache_the_cheaper_one_is_read() -> None:
    measured = rates(10_000.0, of="disk")
    measured.report("a", [SourceRate("disk", 0.0, 10_000.0), SourceRate("shared", 0.0, 5_000.0)], now=0.0)
    for on_disk, source in ((8, "disk"), (2, "shared")):
        found = fetch(Sources(measured, stored={"disk": {"a": on_disk}, "shared": {"a": 8}}))
        assert found is not None
        assert (found.source, found.source_name, found.holder) == (source, source, None)


def test_a_guess_supposes_half_the_time_of_computing() -> None:
    unknown = SourceRates()
    assert fetch(Sources(unknown, [holder(10)], takers={"a"})) is None
    found = fetch(Sources(unknown, [holder(10)], takers={"a"}, guesses=True))
    assert found is not None
    assert found.seconds == pytest.approx(0.05 + 10 * SIZE * TOKEN_S / 2)


@given(
    st.integers(0, 10),
    st.integers(0, 10),
    st.floats(0, 5),
    st.floats(1, 1e6),
    st.floats(0, 1),
    st.floats(0, 50),
    st.floats(0, 1),
)
def test_no_other_number_of_blocks_would_cost_less(
    cached: int, held: int, queue_s: float, tokens_per_s: float, latency_s: float, prefill: float, memory: float
) -> None:
    """Compared with every number, by the cost as it is written down; the parts add up to it."""
    prices, this = Prices(prefill, 0.0, memory), replica(queue_s)

    def cost(number: int) -> float:
        """Return the cost by the formula of the module's docstring."""
        seconds = latency_s + number * SIZE / tokens_per_s if number else 0.0
        computed = (PROMPT.num_tokens - (cached + number) * SIZE) * TOKEN_S
        evicted = memory * number * SIZE * TOKEN_S
        return max(this.queue_s, seconds) + (1 + prefill) * computed + evicted

    best = min(range(max(0, held - cached) + 1), key=cost)
    found = best_fetch("a", this, PROMPT, cached, peers(held, tokens_per_s, latency_s), prices)
    number = 0 if found is None else found.num_fetched
    if SIZE / tokens_per_s >= SIZE * TOKEN_S:
        best = 0
    assert cost(number) == pytest.approx(cost(best))
    if found is not None:
        assert cached < found.num_blocks <= held
        parts = prompt_cost(this, PROMPT, cached, prices, found)
        assert sum(parts) == pytest.approx(cost(number))
        assert sum(parts) == pytest.approx(cost(0) - found.saved_s)
