"""RoutingLog: the last routed requests."""

from __future__ import annotations

from deployments.routing.log import LENGTH, RoutedRequest, RoutingLog
from deployments.routing.policy import Decision


def test_a_request_is_logged_at_its_dispatch() -> None:
    log = RoutingLog(clock=lambda: 8.0)
    log.record_decision("r", Decision(["a", "b"], "hit", 4, 4))
    assert log.recent() == []
    log.record_dispatch("r", "a", 70, 4, 16)
    log.record_dispatch("r", "b", 70, 0, 16)  # logged already
    assert log.recent() == [RoutedRequest(8.0, "a", "hit", 70, 64, 64)]


def test_a_full_first_choice_is_not_logged_as_a_hit() -> None:
    log = RoutingLog(clock=lambda: 8.0)
    log.record_decision("r", Decision(["a", "b"], "hit", 4, 4))
    log.record_dispatch("r", "b", 70, 1, 16)
    assert log.recent() == [RoutedRequest(8.0, "b", "balanced", 70, 16, 64)]


def test_a_rejected_request_is_logged_with_its_last_replica() -> None:
    log = RoutingLog(clock=lambda: 8.0)
    for replica in ("a", "b"):
        log.record_decision("r", Decision(["a", "b"], "cold", 0, 0))
        log.record_dispatch("r", replica, 70, 0, 16)
    assert [one.replica for one in log.recent()] == ["b"]
    log.end("r")
    log.record_decision("r", Decision(["a"], "cold", 0, 0))
    log.record_dispatch("r", "a", 70, 0, 16)
    assert [one.replica for one in log.recent()] == ["b", "a"]


def test_the_log_is_bounded() -> None:
    log = RoutingLog()
    for number in range(2 * LENGTH):
        log.record_decision(str(number), Decision(["a"], "cold", 0, 0))
        log.record_dispatch(str(number), "a", number, 0, 16)
    assert [one.prompt_tokens for one in log.recent()] == list(range(LENGTH, 2 * LENGTH))
    log.record_decision("gone", Decision(["a"], "cold", 0, 0))
    log.end("gone")
    log.record_dispatch("gone", "a", 1, 0, 16)
    assert len(log.recent()) == LENGTH
