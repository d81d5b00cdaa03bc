"""How long a replica may continue, by Serve's limit and by the end of its node."""

from __future__ import annotations

import asyncio
import logging
from math import inf

import pytest

from deployments.serve import grace as grace_module
from deployments.serve.grace import Grace, seconds_left
from tests.waiting import until_in_loop


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class _Context:
    def get_node_id(self) -> str:
        return "mine"


class Ray:
    """Ray's control store: when each draining node ends."""

    def __init__(self) -> None:
        self.deadlines: dict[str, int] | Exception = {}
        self.num_asked = 0

    def answer(self) -> dict[str, int]:
        self.num_asked += 1
        if isinstance(self.deadlines, Exception):
            raise self.deadlines
        return self.deadlines


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    store = Ray()
    monkeypatch.setattr(grace_module, "_deadlines", store.answer)
    monkeypatch.setattr(grace_module.ray, "get_runtime_context", _Context)
    monkeypatch.setattr(grace_module.time, "time", lambda: 5_000.0)
    return store


@pytest.mark.parametrize(
    ("limit_s", "hand_over_s", "lending_s"), [(600, 590, 599), (8, 4, 7.2), (4, 2, 3.6), (2, 1, 1.8), (0, 0, 0)]
)
def test_requests_are_handed_over_shortly_before_the_end_and_pages_are_lent_after_it(
    limit_s: float, hand_over_s: float, lending_s: float, clock: Clock
) -> None:
    grace = Grace(limit_s, clock=clock)
    assert (grace.seconds, grace.hand_over_in_s) == (limit_s, hand_over_s)
    assert grace.lending_s == pytest.approx(lending_s)
    clock.now += 1.0
    assert (grace.seconds, grace.hand_over_in_s) == (limit_s - 1, hand_over_s - 1)


def test_a_node_without_a_deadline_does_not_end() -> None:
    assert seconds_left(0, 1_000.0) == inf
    assert seconds_left(1_030_000, 1_000.0) == 30.0
    assert seconds_left(900_000, 1_000.0) == 0.0


@pytest.mark.parametrize(
    ("deadlines", "expected"),
    [({}, 600), ({"other": 1}, 600), ({"mine": 1}, 0), ({"mine": 0}, 600), ({"mine": 5_030_000}, 30)],
)
def test_the_node_may_end_before_serve_kills_the_replica(
    deadlines: dict[str, int], expected: float, clock: Clock, ray: Ray
) -> None:
    ray.deadlines = deadlines
    grace = Grace(600.0, clock=clock)
    grace.ask()
    assert grace.seconds == expected


async def test_a_notice_that_comes_while_the_replica_drains_shortens_its_grace(
    clock: Clock, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grace_module, "ASK_EVERY_S", 0.001)
    grace = Grace(600.0, clock=clock)
    asking = asyncio.create_task(grace.keep_asking())
    await until_in_loop(lambda: ray.num_asked > 1)
    assert grace.hand_over_in_s == 590.0
    clock.now += 100.0
    ray.deadlines = {"mine": 5_030_000}
    await until_in_loop(lambda: grace.seconds < 500.0)
    asking.cancel()
    assert (grace.seconds, grace.hand_over_in_s, grace.lending_s) == (30.0, 20.0, 29.0)


def test_asking_again_does_not_move_the_hand_over(clock: Clock, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a short grace is half of what there was at the notice, not of what is left."""
    grace = Grace(600.0, clock=clock)
    ray.deadlines = {"mine": 5_008_000}
    grace.ask()
    clock.now += 2.0
    monkeypatch.setattr(grace_module.time, "time", lambda: 5_002.0)
    grace.ask()
    assert (grace.seconds, grace.hand_over_in_s) == (6.0, 2.0)


def test_without_an_answer_from_ray_the_limit_counts(clock: Clock, ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    ray.deadlines = RuntimeError("no answer")
    grace = Grace(600.0, clock=clock)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        grace.ask()
        grace.ask()
    assert grace.seconds == 600.0
    assert [record.getMessage() for record in caplog.records] == ["whether this node drains is not known: no answer"]
