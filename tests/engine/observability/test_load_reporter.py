"""LoadReporter, with a clock that the tests move."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from engine.observability.load import EngineLoad
from engine.observability.load_reporter import LoadReporter
from tests.engine.observability.clock import Clock

LOAD = EngineLoad(1, 0, 0, 64, 60, 1000.0, 5)


class Reported:
    """A reporter with an interval of 10 ms, its clock, and its reports."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reports: list[EngineLoad] = []
        self.reporter = LoadReporter(self.reports.append, 0.01, self.clock)


def test_changes_of_the_queue_are_reported_and_mere_decoding_is_not() -> None:
    reported = Reported()
    update, clock = reported.reporter.update, reported.clock
    assert update(LOAD, 1, is_idle=False) is None
    for num_steps in range(6, 20):
        clock.now += 0.015
        assert update(replace(LOAD, num_steps=num_steps, num_free_blocks=59), 1, is_idle=False) is None
    assert reported.reports == [LOAD]
    changed = replace(LOAD, num_waiting=1)
    update(changed, 1, is_idle=False)
    clock.now += 1
    update(changed, 3, is_idle=False)  # one came and one left
    assert reported.reports == [LOAD, changed, changed]


def test_steps_are_reported_now_and_then_while_a_full_batch_decodes_and_others_wait() -> None:
    """Ingresses take a replica that has waiting requests and reports no new steps for stuck."""
    reported = Reported()
    waiting = replace(LOAD, num_waiting=3)
    for num_steps in range(1000):
        reported.reporter.update(replace(waiting, num_steps=num_steps), 1, is_idle=False)
        reported.clock.now += 0.01
    steps = [load.num_steps for load in reported.reports]
    assert 30 <= len(steps) <= 41
    assert all(later - sooner <= 30 for sooner, later in pairwise(steps))
    assert reported.reporter.update(reported.reports[-1], 1, is_idle=False) is None
    assert len(reported.reports) == len(steps), "nothing has moved"


def test_a_change_within_the_interval_is_reported_after_it() -> None:
    reported = Reported()
    update, clock = reported.reporter.update, reported.clock
    update(LOAD, 1, is_idle=False)
    clock.now += 0.004
    last = replace(LOAD, num_running=0, num_steps=9)
    assert update(last, 2, is_idle=True) == pytest.approx(0.006)
    assert reported.reports == [LOAD]
    clock.now += 0.0061
    assert update(last, 2, is_idle=True) is None
    assert update(last, 2, is_idle=True) is None
    assert reported.reports == [LOAD, last]


def test_the_idle_state_is_reported_even_if_only_decoding_went_on() -> None:
    reported = Reported()
    reported.reporter.update(LOAD, 1, is_idle=False)
    reported.clock.now += 1
    last = replace(LOAD, num_free_blocks=64, prefill_tokens_per_s=900.0)
    reported.reporter.update(last, 1, is_idle=True)
    assert reported.reports[-1] == last
