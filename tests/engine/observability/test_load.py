"""EngineLoad, the meter that measures rates, and the reporter that tells a listener of changes. No real clock."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.kv.block_manager import BlockManager
from engine.observability.load import EngineLoad, LoadMeter, LoadReporter
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.prefill_backlog import PrefillBacklog
from tests.engine.shadow import make_engine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Metered:
    """A meter and the clock that it reads."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.meter = LoadMeter(PrefillBacklog(BlockManager(8, 4)), self.clock)

    def step(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        self.meter.step_started()
        self.clock.now += seconds
        self.meter.step_finished(num_tokens, num_sequences)


def test_nothing_is_claimed_before_it_was_seen() -> None:
    metered = Metered()
    assert (metered.meter.prefill_tokens_per_s, metered.meter.decode_step_s) == (0.0, 0.0)
    metered.step(300, 200, 0.1)  # too little prefill to say anything about either
    assert (metered.meter.prefill_tokens_per_s, metered.meter.decode_step_s) == (0.0, 0.0)
    assert metered.meter.num_steps == 1


def test_prefills_and_decodes_are_told_apart() -> None:
    metered = Metered()
    metered.step(2048, 8, 0.5)
    metered.step(8, 8, 0.02)
    assert metered.meter.prefill_tokens_per_s == pytest.approx(4096)
    assert metered.meter.decode_step_s == pytest.approx(0.02)
    metered.step(1, 1, 0.0)  # a clock that stands still says nothing
    metered.step(0, 0, 1.0)
    assert metered.meter.decode_step_s == pytest.approx(0.02)


def test_short_prompts_tell_nothing_and_full_steps_outweigh_others() -> None:
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


LOAD = EngineLoad(1, 0, 0, 64, 60, 1000.0, 0.01, 5)


class Listening:
    """A reporter of 10 ms, its clock, and what it told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.heard: list[EngineLoad] = []
        self.reporter = LoadReporter(self.heard.append, 0.01, self.clock)


def test_changes_of_the_queue_are_told_and_mere_decoding_is_not() -> None:
    listening = Listening()
    note, clock = listening.reporter.note, listening.clock
    assert note(LOAD, 1, is_idle=False) is None
    for num_steps in range(6, 20):
        clock.now += 0.015
        assert note(replace(LOAD, num_steps=num_steps, num_free_blocks=59), 1, is_idle=False) is None
    assert listening.heard == [LOAD]
    changed = replace(LOAD, num_waiting=1)
    note(changed, 1, is_idle=False)
    clock.now += 1
    note(changed, 3, is_idle=False)  # one came and one left
    assert listening.heard == [LOAD, changed, changed]


def test_steps_are_told_of_now_and_then_while_a_full_batch_decodes_and_others_wait() -> None:
    """Who waits there must not seem to wait in vain: ingresses take a replica without steps for hung."""
    listening = Listening()
    waiting = replace(LOAD, num_waiting=3)
    for num_steps in range(1000):
        listening.reporter.note(replace(waiting, num_steps=num_steps), 1, is_idle=False)
        listening.clock.now += 0.01
    heard = [load.num_steps for load in listening.heard]
    assert 30 <= len(heard) <= 41
    assert all(later - sooner <= 30 for sooner, later in pairwise(heard))
    assert listening.reporter.note(listening.heard[-1], 1, is_idle=False) is None
    assert len(listening.heard) == len(heard), "nothing has moved"


def test_what_comes_too_early_is_told_when_its_time_has_come() -> None:
    listening = Listening()
    note, clock = listening.reporter.note, listening.clock
    note(LOAD, 1, is_idle=False)
    clock.now += 0.004
    last = replace(LOAD, num_running=0, num_steps=9)
    assert note(last, 2, is_idle=True) == pytest.approx(0.006)
    assert listening.heard == [LOAD]
    clock.now += 0.0061
    assert note(last, 2, is_idle=True) is None
    assert note(last, 2, is_idle=True) is None
    assert listening.heard == [LOAD, last]


def test_the_idle_state_is_told_even_if_only_decoding_moved_since() -> None:
    listening = Listening()
    listening.reporter.note(LOAD, 1, is_idle=False)
    listening.clock.now += 1
    last = replace(LOAD, num_free_blocks=64, decode_step_s=0.02)
    listening.reporter.note(last, 1, is_idle=True)
    assert listening.heard[-1] == last


def test_an_engine_says_how_busy_it_is() -> None:
    engine, _ = make_engine(num_blocks=16, block_size=4, max_num_seqs=2)
    for i in range(3):
        engine.add_request(EngineRequest(str(i), [i] * 9, SamplingParams(max_tokens=3)))
    before = engine.load()
    assert (before.num_running, before.num_waiting, before.queued_prefill_tokens) == (0, 3, 27)
    assert before.num_blocks == before.num_free_blocks == 16
    engine.step()
    after = engine.load()
    assert (after.num_running, after.num_waiting, after.queued_prefill_tokens) == (2, 1, 9)
    assert (after.num_free_blocks, after.num_steps) == (10, 1)
    assert after.prefill_tokens_per_s == 0  # eighteen tokens do not tell
    assert pickle.loads(pickle.dumps(after)) == after
