"""The choice of a replica together with a source of what it lacks, through the view that the requests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.observability.ingress_metrics import (
    ROUTING_FETCHED_TOKENS,
    ROUTING_PREDICTED_FETCH_TOKENS,
    ingress_recorder,
)
from deployments.routing.policy import Decision
from deployments.transport.pages.address import PageAddress
from deployments.transport.request_channel.dispatch import Dispatch
from engine.kv.events import StorageName
from engine.observability.load import SourceRate
from engine.observability.metrics import Metric
from engine.request import KVSource
from tests.deployments.routing.dispatches import dispatch_of
from tests.deployments.routing.views import BLOCK_SIZE, IDLE, View, make_view, prompt, queue

PROMPT = prompt(7, length=64)
TOKENS = len(PROMPT) * BLOCK_SIZE + 1  # a second of prefill


def endpoint(name: str) -> str:
    return f"tcp://{name}:1"


def metadata(names: str) -> dict[str, dict[str, str]]:
    return {name: PageAddress(endpoint(name), f"secret of {name}").metadata for name in names}


def paged_view(names: str = "abc", *, rate: float = 100_000.0) -> View:
    """Return idle replicas that serve pages; each fetches ``rate`` tokens a second, or has not measured it."""
    view = make_view(names)
    view.set_replicas(metadata(names))
    if rate:
        measured = SourceRate(endpoint("x"), 0.0, rate)
        for name in names:
            view.routing.report(name, replace(IDLE, source_rates=(measured,)), now=0.0)
    return view


def choose(view: View, names: str = "abc", *, avoid: Sequence[str] = (), request_id: str = "id") -> Decision:
    dispatch = dispatch_of(PROMPT, TOKENS, avoid=avoid)
    dispatch.request = replace(dispatch.request, request_id=request_id)
    return view.choose(dispatch, list(names))


def recorded(metric: Metric) -> float:
    return sum(sample.value for sample in ingress_recorder().snapshot() if sample.metric is metric)


def source(decision: Decision) -> str | None:
    """Return the name of the peer that a decision names."""
    holder = decision.fetch.holder if decision.fetch is not None else None
    return holder.name if holder is not None else None


def test_a_replica_without_a_queue_pulls_what_a_busy_one_holds() -> None:
    view = paged_view()
    view.routing.stored("a", PROMPT)
    assert source(choose(view)) is None
    queue(view, "a", 1_500)
    decision = choose(view)
    assert decision.replica != "a"
    assert source(decision) == "a"
    assert (decision.num_cached_blocks, decision.num_held_blocks, decision.outcome) == (0, 64, "balanced")
    assert view.kv_source(decision) == KVSource(endpoint("a"), "secret of a", 64 * BLOCK_SIZE)
    assert decision.cost.fetch_s == pytest.approx(64 * BLOCK_SIZE / 100_000)
    assert decision.cost.prefill_s == pytest.approx(0.001)


def test_without_a_queue_nothing_is_pulled_and_no_source_is_named() -> None:
    view = paged_view()
    view.routing.stored("a", PROMPT)
    decision = choose(view)
    assert (decision.replica, decision.fetch, view.kv_source(decision)) == ("a", None, None)


def test_a_twin_follows_where_the_blocks_are_on_their_way() -> None:
    """The choice reserves at once: the second request of a burst neither pulls again nor goes to a third replica."""
    view = paged_view("abcdefgh")
    view.routing.stored("a", PROMPT)
    queue(view, "a", 1_500)
    first = choose(view, "abcdefgh")
    dispatch = dispatch_of(PROMPT, TOKENS, first.replica)
    view.sent(dispatch, first)
    assert dispatch.num_uncached_tokens == 1
    second = choose(view, "abcdefgh")
    assert (second.replica, second.fetch) == (first.replica, None)
    (routed,) = view.recently_routed()
    assert (routed.source, routed.fetched_tokens, routed.predicted_tokens) == ("a", 64 * BLOCK_SIZE, 0)
    assert routed.fetch_s == pytest.approx(64 * BLOCK_SIZE / 100_000, abs=1e-4)


def test_what_is_only_assumed_to_be_at_a_peer_is_not_pulled() -> None:
    """It may still be computed there: a pull would wait for that, or bring nothing."""
    view = paged_view()
    view.routing.stored("a", PROMPT[:20])
    view.routing.awaited("a", PROMPT, now=0.0)
    queue(view, "a", 5_000)
    decision = choose(view)
    assert source(decision) == "a"
    assert decision.num_held_blocks == 20
    view = paged_view()
    view.routing.awaited("a", PROMPT, now=0.0)
    queue(view, "a", 5_000)
    assert source(choose(view)) is None


def test_a_replica_that_has_failed_or_gone_silent_or_serves_no_pages_is_no_source() -> None:
    def is_source(view: View, avoid: Sequence[str] = ()) -> bool:
        return source(choose(view, avoid=avoid)) == "a"

    def busy_view() -> View:
        view = paged_view()
        view.routing.stored("a", PROMPT)
        queue(view, "a", 1_500)
        return view

    assert is_source(busy_view())
    assert not is_source(busy_view(), avoid=["a"])
    silent = busy_view()
    for name in "bc":
        silent.routing.report(name, IDLE, now=9.0)
    silent.now = 9.0
    assert not is_source(silent)
    for serving in ("bc", "a"):  # the source does not, or the target
        view = busy_view()
        view.set_replicas({name: metadata(name)[name] if name in serving else {} for name in "abc"})
        assert not is_source(view)
    lost = busy_view()
    lost.set_replicas(metadata("bc"))
    assert source(choose(lost, "bc")) is None
    unconfirmed = busy_view()
    unconfirmed.routing.events_lost("a")
    assert not is_source(unconfirmed)


def test_a_stream_that_moves_pulls_its_blocks_although_no_rate_is_known() -> None:
    view = paged_view(rate=0.0)
    view.routing.stored("a", PROMPT)
    queue(view, "a", 3_000)
    dispatch = dispatch_of(PROMPT, TOKENS)
    dispatch.request = replace(dispatch.request, output_token_ids=[1, 2], prompt_token_ids=[1] * (TOKENS - 2))
    for _ in range(3):  # of several streams of a lost replica
        assert source(view.choose(dispatch, list("bc"))) == "a"
    assert source(view.choose(dispatch, list("bc"), is_lost="a".__eq__)) is None  # Serve has not noticed its end yet


def test_a_replica_that_hands_a_stream_over_is_its_source_until_it_ends() -> None:
    """It holds the blocks of the answer although its events may still be on the way."""
    view = paged_view(rate=0.0)
    dispatch = dispatch_of(PROMPT, TOKENS, "a")
    view.sent(dispatch, choose(view))
    dispatch.is_handed_over = True
    view.set_replicas(metadata("bc"))
    view.ended(dispatch)
    again = dispatch_of(PROMPT, TOKENS)
    again.handed_over_by = "a"
    decision = view.choose(again, list("bc"))
    assert (source(decision), decision.num_held_blocks) == ("a", len(PROMPT))
    assert view.kv_source(decision) == KVSource(endpoint("a"), "secret of a", len(PROMPT) * BLOCK_SIZE)
    view.now = 9.0  # it reports no more
    for name in "bc":
        view.routing.report(name, IDLE, now=9.0)
    assert view.choose(again, list("bc")).fetch is None
    assert "a" not in view.table.by_name


def test_a_replica_that_has_handed_a_stream_over_and_then_ended_is_no_source() -> None:
    """Serve lists it still."""
    view = paged_view(rate=0.0)
    dispatch = dispatch_of(PROMPT, TOKENS)
    dispatch.handed_over_by = "a"
    assert source(view.choose(dispatch, list("bc"))) == "a"
    assert source(view.choose(dispatch, list("bc"), is_lost="a".__eq__)) is None
    view.now = 9.0  # the others report
    for name in "bc":
        view.routing.report(name, IDLE, now=9.0)
    assert source(view.choose(dispatch, list("bc"))) is None


def test_a_draining_replica_is_a_source_but_gets_no_request() -> None:
    view = paged_view()
    view.routing.stored("a", PROMPT)
    view.sent(dispatch_of([], 10, "a"), choose(view))  # it runs on, so the replica stays observed
    view.set_replicas(metadata("bc"))
    decision = choose(view, "bc")
    assert decision.replica != "a"
    assert source(decision) == "a"


@pytest.mark.parametrize("storage", get_args(StorageName))
def test_a_request_goes_by_the_storage_of_a_replica_whose_rate_is_known(storage: StorageName) -> None:
    view = paged_view(rate=0.0)
    view.set_replicas({name: {} for name in "abc"})  # no peer serves pages
    view.routing.saved("b", PROMPT, storage)
    assert choose(view).fetch is None
    view.routing.report("b", replace(IDLE, source_rates=(SourceRate(storage, 0.01, 10_000.0),)), now=0.0)
    decision = choose(view)
    assert decision.replica == "b"
    assert decision.fetch is not None
    assert (decision.fetch.holder, decision.num_held_blocks) == (None, 64)
    assert view.kv_source(decision) is None
    dispatch = dispatch_of(PROMPT, TOKENS, "b")
    view.sent(dispatch, decision)
    assert view.recently_routed()[0].source == view.recently_routed()[0].source_kind == storage
    view.routing.unsaved("b", PROMPT[30:], storage)
    view.ended(dispatch)
    assert choose(view).num_held_blocks == 64  # assumed, since a request that needs the blocks was sent there


def test_a_model_with_states_pulls_all_that_a_peer_can_resume_from_or_nothing() -> None:
    view = paged_view()
    for name in "abc":
        view.routing.replaced(name, [], [])
    view.routing.stored("a", PROMPT)
    view.routing.states_stored("a", [PROMPT[31]])
    queue(view, "a", 1_500)
    decision = choose(view)
    assert (source(decision), decision.num_held_blocks) == ("a", 32)
    view = paged_view()
    for name in "abc":
        view.routing.replaced(name, [], [])
    view.routing.stored("a", PROMPT[:40])
    view.routing.awaited("a", PROMPT, now=0.0)
    queue(view, "a", 1_500)
    assert choose(view).fetch is None  # after which of its blocks one may resume is not known


@given(
    st.lists(st.integers(0, 64), min_size=4, max_size=4),
    st.lists(st.integers(0, 3_000), min_size=4, max_size=4),
    st.lists(st.integers(0, 64), min_size=4, max_size=4),
)
def test_with_unknown_rates_the_decision_is_the_one_without_sources(
    cached: list[int], queued: list[int], saved: list[int]
) -> None:
    decisions = []
    for view in (make_view(), paged_view("abcd", rate=0.0)):
        for name, blocks, tokens, on_disk in zip("abcd", cached, queued, saved, strict=True):
            view.routing.stored(name, PROMPT[:blocks])
            view.routing.saved(name, PROMPT[:on_disk])
            queue(view, name, tokens)
        decisions.append(choose(view, "abcd"))
    assert decisions[0] == decisions[1]


@given(
    st.lists(st.integers(0, 64), min_size=4, max_size=4),
    st.lists(st.integers(0, 3_000), min_size=4, max_size=4),
    st.floats(500, 1e6),
)
def test_a_source_holds_more_than_its_taker_and_the_choice_costs_no_more_than_without(
    cached: list[int], queued: list[int], rate: float
) -> None:
    views = make_view(), paged_view("abcd", rate=rate)
    for view in views:
        for name, blocks, tokens in zip("abcd", cached, queued, strict=True):
            view.routing.stored(name, PROMPT[:blocks])
            queue(view, name, tokens)
    before, decision = (choose(view, "abcd") for view in views)
    assert sum(decision.cost) <= 1.002 * sum(before.cost) + 1e-9
    if decision.fetch is not None:
        assert decision.fetch.holder is not None
        holder, held = decision.fetch.holder, dict(zip("abcd", cached, strict=True))
        assert holder.name != decision.replica
        assert held[holder.name] >= decision.num_held_blocks > held[decision.replica]


def test_one_request_in_many_finds_out_how_fast_peers_are() -> None:
    view = paged_view(rate=0.0)
    view.routing.stored("a", PROMPT)
    queue(view, "a", 3_000)
    other = [block + 10**6 for block in PROMPT]
    view.routing.stored("a", other)

    def guesses(hashes: Sequence[int]) -> list[tuple[Dispatch, Decision]]:
        tried = [dispatch_of(hashes, TOKENS) for _ in range(300)]
        for number, dispatch in enumerate(tried):
            dispatch.request = replace(dispatch.request, request_id=f"id{number}")
        decided = [(dispatch, view.choose(dispatch, ("a", "b", "c"))) for dispatch in tried]
        return [(dispatch, decision) for dispatch, decision in decided if decision.fetch is not None]

    assert 5 < len(guesses(PROMPT)) < 60  # a choice alone is no guess: the replica may take no request
    dispatch, decision = guesses(other)[0]
    dispatch.replica = decision.replica
    view.sent(dispatch, decision)
    assert not guesses(PROMPT)  # within ten seconds
    view.routing.report("b", replace(IDLE, source_rates=(SourceRate(endpoint("a"), 0.0, 1e5),)), now=1.0)
    queue(view, "a", 3_000, now=1.0)
    view.now = 1.0
    assert source(choose(view)) == "a"


def test_what_was_to_be_fetched_is_counted_and_how_much_of_it_came() -> None:
    view = paged_view()
    view.routing.stored("a", PROMPT)
    queue(view, "a", 1_500)
    before = recorded(ROUTING_PREDICTED_FETCH_TOKENS), recorded(ROUTING_FETCHED_TOKENS)
    decision = choose(view)
    dispatch = dispatch_of(PROMPT, TOKENS, decision.replica)
    view.sent(dispatch, decision)
    dispatch.num_tokens, dispatch.num_cached_tokens = 5, 40 * BLOCK_SIZE
    view.ended(dispatch)
    assert recorded(ROUTING_PREDICTED_FETCH_TOKENS) - before[0] == 64 * BLOCK_SIZE
    assert recorded(ROUTING_FETCHED_TOKENS) - before[1] == 40 * BLOCK_SIZE
