"""LoadMeter, with a clock that the tests move: which steps it measures, and as what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.page_copies import PageCopies
from engine.observability.load_meter import LoadMeter
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from tests.engine.observability.clock import Clock


class Metered:
    """A meter and the clock that it reads."""

    def __init__(self) -> None:
        self.clock = Clock()
        blocks = BlockManager(8, 4)
        scheduler = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=1)
        self.meter = LoadMeter(scheduler, blocks, PrefillBacklog(blocks), self.clock)

    def step(self, num_new_tokens: list[int], seconds: float, *, computed: int = 100, drafts: int = 0) -> None:
        """Finish a step of sequences that compute these many tokens; the first ones have drafts."""
        sequences: list[Any] = [_Sequence(num_computed_tokens=computed, is_finished=False) for _ in num_new_tokens]
        output = SchedulerOutput(
            sequences=sequences,
            num_new_tokens=num_new_tokens,
            drafts={sequence: [0] for sequence in sequences[:drafts]},
            block_copies=PageCopies(swap_out=[(0, 0)]),
        )
        self.meter.step_started()
        self.meter.step_scheduled(output)
        self.clock.now += seconds
        self.meter.step_finished(output, [], StepTimes())


class _Sequence(SimpleNamespace):
    __hash__ = object.__hash__


def test_prefills_and_decodes_are_measured_apart() -> None:
    metered = Metered()
    for _ in range(50):
        metered.step([1] * 8, 0.02)
        metered.step([1] * 7 + [2041], 0.52)
    load = metered.meter.load()
    assert load.prefill_tokens_per_s == pytest.approx(2048 / 0.52)
    assert load.step_costs.seconds(0, 8, 800) == pytest.approx(0.02, rel=0.1)
    assert load.step_costs.seconds(2041, 7, 700) == pytest.approx(0.52, rel=0.1)
    metered.step([], 1.0)
    metered.step([1], 0.0)  # the clock stood still
    assert metered.meter.load().step_costs == load.step_costs
    assert metered.meter.num_steps == 102


def test_an_answer_with_a_draft_is_a_decode() -> None:
    metered = Metered()
    for _ in range(20):
        metered.step([1] * 4, 0.02)
    metered.step([2, 1, 1, 1], 0.02, drafts=1)
    assert metered.meter.load().step_costs.seconds(0, 4, 400) == pytest.approx(0.02, rel=0.1)


def test_a_step_launched_while_another_is_in_flight_begins_when_that_is_finished() -> None:
    metered = Metered()
    outputs = [
        SchedulerOutput(sequences=[_Sequence(num_computed_tokens=9, is_finished=False)], num_new_tokens=[1])  # type: ignore[list-item]
        for _ in range(2)
    ]
    for output in outputs:
        metered.meter.step_started()
        metered.meter.step_scheduled(output)
    for output in outputs:
        metered.clock.now += 0.5
        metered.meter.step_finished(output, [], StepTimes())
    assert metered.meter.load().step_costs.seconds(0, 1, 9) == pytest.approx(0.5)
