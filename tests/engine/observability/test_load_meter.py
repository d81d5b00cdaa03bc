"""LoadMeter, with a clock that the tests move."""

from __future__ import annotations

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

    def step(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        sequences: list[Any] = [None] * num_sequences
        output = SchedulerOutput(
            sequences=sequences, num_new_tokens=[num_tokens], block_copies=PageCopies(swap_out=[(0, 0)])
        )
        self.meter.step_started()
        self.meter.step_scheduled(output)
        self.clock.now += seconds
        self.meter.step_finished(output, [], StepTimes())


def test_rates_are_zero_before_they_are_measured() -> None:
    metered = Metered()
    assert (metered.meter.prefill_tokens_per_s, metered.meter.decode_step_s) == (0.0, 0.0)
    metered.step(300, 200, 0.1)  # too little prefill for either measurement
    assert (metered.meter.prefill_tokens_per_s, metered.meter.decode_step_s) == (0.0, 0.0)
    assert metered.meter.num_steps == 1


def test_prefills_and_decodes_are_measured_apart() -> None:
    metered = Metered()
    metered.step(2048, 8, 0.5)
    metered.step(8, 8, 0.02)
    assert metered.meter.prefill_tokens_per_s == pytest.approx(4096)
    assert metered.meter.decode_step_s == pytest.approx(0.02)
    metered.step(1, 1, 0.0)  # the clock stood still: not measured
    metered.step(0, 0, 1.0)
    assert metered.meter.decode_step_s == pytest.approx(0.02)


def test_short_prompts_are_not_measured_and_full_steps_outweigh_others() -> None:
    metered = Metered()
    for _ in range(1000):
        metered.step(10, 1, 0.01)  # 1000 tokens a second: the step's own cost is nearly all
    assert metered.meter.prefill_tokens_per_s == 0
    for _ in range(20):
        metered.step(150, 1, 0.05)
    metered.step(2048, 1, 0.2)
    assert metered.meter.prefill_tokens_per_s > 8000


def test_rates_follow_a_change_and_forget_a_pause() -> None:
    metered = Metered()
    for _ in range(100):
        metered.step(2048, 1, 0.2)
        metered.step(8, 8, 0.02)
    metered.step(8, 8, 5.0)
    assert metered.meter.decode_step_s < 0.024
    for _ in range(100):
        metered.step(2048, 1, 0.4)
        metered.step(8, 8, 0.2)
    assert metered.meter.prefill_tokens_per_s == pytest.approx(5120, rel=0.05)
    assert metered.meter.decode_step_s == pytest.approx(0.2, rel=0.05)
