"""How long a replica may go on, by Serve's limit and by the end of its node."""

from __future__ import annotations

import logging
from math import inf

import pytest

from deployments.serve import grace
from deployments.serve.grace import Grace, seconds_left


def test_unfinished_requests_are_handed_over_shortly_before_the_end() -> None:
    assert Grace(600.0).hand_over_after_s == 590.0
    assert Grace(8.0).hand_over_after_s == 4.0
    assert Grace(0.0).hand_over_after_s == 0.0


def test_a_node_without_a_deadline_does_not_end() -> None:
    assert seconds_left(0, 1_000.0) == inf
    assert seconds_left(1_030_000, 1_000.0) == 30.0
    assert seconds_left(900_000, 1_000.0) == 0.0


class _Context:
    def get_node_id(self) -> str:
        return "mine"


@pytest.mark.parametrize(
    ("deadlines", "expected"), [({}, 600), ({"other": 1}, 600), ({"mine": 1}, 0), ({"mine": 0}, 600)]
)
def test_the_node_may_end_before_serve_kills_the_replica(
    deadlines: dict[str, int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grace, "_deadlines", lambda: deadlines)
    monkeypatch.setattr(grace.ray, "get_runtime_context", _Context)
    assert Grace.of_this_replica(600.0) == Grace(expected)


def test_without_an_answer_from_ray_the_limit_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("no answer")

    monkeypatch.setattr(grace, "_deadlines", fail)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert Grace.of_this_replica(600.0) == Grace(600.0)
