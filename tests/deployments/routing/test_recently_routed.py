"""RecentlyRouted: the last routed requests."""

from __future__ import annotations

from deployments.routing.cost import Fetch, Holder, PromptCost
from deployments.routing.policy import Decision
from deployments.routing.recently_routed import LENGTH, RecentlyRouted, RoutedRequest
from engine.kv.events import StorageName
from tests.deployments.routing.dispatches import dispatch_of

COLD = Decision("a", "cold", 0, 0)


def test_a_request_is_listed_when_it_is_sent() -> None:
    routed = RecentlyRouted(clock=lambda: 8.0)
    assert routed.requests() == []
    decision = Decision("b", "balanced", 1, 4, PromptCost(0.5, 0.25, 1.0, 0.125), 2.5)
    routed.add(dispatch_of([1, 2, 3, 4], 70, "b"), decision, 16)
    entry = RoutedRequest(8.0, "b", "balanced", 70, 16, 64, 0.5, 0.25, 1.0, 0.125, 2.5, predicted_s=0.75)
    assert routed.requests() == [entry]
    routed.add(dispatch_of([], 70, "b"), decision, 16, knows_rates=False)  # what it costs is in tokens
    assert routed.requests()[-1].predicted_s is None


def test_the_entry_of_an_ended_request_has_the_measured_time_of_its_first_token() -> None:
    routed = RecentlyRouted(clock=lambda: 8.0)
    lost, dispatch = dispatch_of([], 70, "a"), dispatch_of([], 70, "b")
    for each in (lost, dispatch):
        routed.add(each, COLD, 16)
        each.sent_at = 100.0
    unchanged = routed.ended(lost)  # without a token
    assert unchanged is not None
    assert unchanged.measured_s is None
    dispatch.first_token = 100.5
    entry = routed.ended(dispatch)
    assert entry is not None
    assert entry.measured_s == 0.5
    assert routed.requests()[-1] is entry
    assert routed.requests()[0].measured_s is None
    assert routed.ended(dispatch_of([], 70, "a")) is None  # it was never sent


def test_a_request_is_listed_with_its_source() -> None:
    routed, cost = RecentlyRouted(clock=lambda: 8.0), PromptCost(0.5, 0.25, 1.0, 0.125, 0.25)
    sources: list[tuple[Holder | StorageName, str]] = [(Holder("a", "tcp://a:1", "secret", 4), "a")]
    for source, name in [*sources, ("disk", "disk"), ("shared", "shared")]:
        fetch = Fetch(source, 3, 2, 0.75, 0.0, 1.0)
        routed.add(dispatch_of([1, 2, 3, 4], 70, "b"), Decision("b", "balanced", 1, 4, cost, None, fetch), 16)
        entry = routed.requests()[-1]
        assert (entry.source, entry.fetched_tokens, entry.fetch_s) == (name, 32, 0.75)
        assert [entry.num_fetched_of(cached) for cached in (0, 16, 40, 48, 64)] == [0, 0, 24, 32, 32]


def test_a_returned_request_is_listed_with_its_last_replica() -> None:
    routed = RecentlyRouted(clock=lambda: 8.0)
    dispatch = dispatch_of([], 70)
    for dispatch.replica in ("a", "b"):
        routed.add(dispatch, COLD, 16)
    assert [request.replica for request in routed.requests()] == ["b"]
    routed.add(dispatch_of([], 70, "a"), COLD, 16)
    assert [request.replica for request in routed.requests()] == ["b", "a"]


def test_the_list_is_bounded() -> None:
    routed = RecentlyRouted()
    first = dispatch_of([], 0, "a")
    routed.add(first, COLD, 16)
    for number in range(1, 2 * LENGTH):
        routed.add(dispatch_of([], number, "a"), COLD, 16)
    assert [request.prompt_tokens for request in routed.requests()] == list(range(LENGTH, 2 * LENGTH))
    routed.add(first, COLD, 16)  # its entry is gone, and it is sent again
    assert [request.prompt_tokens for request in routed.requests()] == [*range(LENGTH + 1, 2 * LENGTH), 0]
