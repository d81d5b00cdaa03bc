"""RecentlyRouted: the last routed requests."""

from __future__ import annotations

from deployments.routing.policy import Decision
from deployments.routing.recently_routed import LENGTH, RecentlyRouted, RoutedRequest


def test_a_request_is_listed_at_its_dispatch() -> None:
    routed = RecentlyRouted(clock=lambda: 8.0)
    routed.record_decision("r", Decision(["a", "b"], "hit", 4, 4))
    assert routed.requests() == []
    routed.record_dispatch("r", "a", 70, 4, 16)
    routed.record_dispatch("r", "b", 70, 0, 16)  # listed already
    assert routed.requests() == [RoutedRequest(8.0, "a", "hit", 70, 64, 64)]


def test_a_full_first_choice_is_not_listed_as_a_hit() -> None:
    routed = RecentlyRouted(clock=lambda: 8.0)
    routed.record_decision("r", Decision(["a", "b"], "hit", 4, 4))
    routed.record_dispatch("r", "b", 70, 1, 16)
    assert routed.requests() == [RoutedRequest(8.0, "b", "balanced", 70, 16, 64)]


def test_a_rejected_request_is_listed_with_its_last_replica() -> None:
    routed = RecentlyRouted(clock=lambda: 8.0)
    for replica in ("a", "b"):
        routed.record_decision("r", Decision(["a", "b"], "cold", 0, 0))
        routed.record_dispatch("r", replica, 70, 0, 16)
    assert [one.replica for one in routed.requests()] == ["b"]
    routed.ended("r")
    routed.record_decision("r", Decision(["a"], "cold", 0, 0))
    routed.record_dispatch("r", "a", 70, 0, 16)
    assert [one.replica for one in routed.requests()] == ["b", "a"]


def test_the_list_is_bounded() -> None:
    routed = RecentlyRouted()
    for number in range(2 * LENGTH):
        routed.record_decision(str(number), Decision(["a"], "cold", 0, 0))
        routed.record_dispatch(str(number), "a", number, 0, 16)
    assert [one.prompt_tokens for one in routed.requests()] == list(range(LENGTH, 2 * LENGTH))


def test_nothing_is_kept_of_a_request_that_ends_without_a_replica() -> None:
    """Its id may be used again, for a call that the router did not choose a replica for."""
    routed = RecentlyRouted()
    routed.record_decision("r", Decision(["a"], "cold", 0, 0))
    routed.ended("r")
    routed.record_dispatch("r", "a", 70, 0, 16)
    assert routed.requests() == []
