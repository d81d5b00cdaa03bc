"""Scheduler: token budget and order, through the real engine with a shadow runner."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.scheduling.steps import add, make_step, step_sizes
from tests.engine.shadow import check_integrity, make_engine, run_all_to_end, run_to_end


def test_a_long_prompt_is_chunked_to_the_budget() -> None:
    engine, _ = make_engine(max_num_batched_tokens=16)
    add(engine, "long", 40)
    assert [step_sizes(engine)["long"] for _ in range(4)] == [16, 16, 8, 1]


def test_a_step_mixes_decodes_with_a_prefill_chunk() -> None:
    engine, _ = make_engine(max_num_batched_tokens=16)
    add(engine, "short", 4, max_tokens=20)
    step_sizes(engine)
    add(engine, "long", 40, first=30)
    assert step_sizes(engine) == {"short": 1, "long": 15}


def test_sustained_prefill_does_not_starve_decode() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8, num_blocks=512)
    add(engine, "decoding", 4, max_tokens=40)
    step_sizes(engine)
    for i in range(20):
        add(engine, f"long{i}", 60, first=i)
        assert step_sizes(engine)["decoding"] == 1


def test_a_crowd_of_decodes_does_not_starve_a_prefill() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8, num_blocks=512)
    for i in range(7):
        add(engine, f"decoding{i}", 1, max_tokens=100, first=i)
    step_sizes(engine)
    add(engine, "long", 30, first=20)
    for i in range(20):
        add(engine, f"later{i}", 1, max_tokens=100, first=i)
        assert step_sizes(engine)["long"] >= 1


def test_budget_and_slots_are_kept() -> None:
    engine, _ = make_engine(max_num_batched_tokens=32, max_num_seqs=3)
    for i in range(10):
        add(engine, str(i), 20, first=i)
    while engine.has_unfinished:
        sizes = step_sizes(engine)
        assert sum(sizes.values()) <= 32
        assert len(sizes) <= 3


def test_a_long_prefill_leaves_the_budget_to_others() -> None:
    engine, _ = make_engine(max_num_batched_tokens=32, long_prefill_threshold=8)
    add(engine, "long", 40)
    add(engine, "short", 6, first=50)
    assert step_sizes(engine) == {"long": 8, "short": 6}
    assert step_sizes(engine) == {"long": 8, "short": 1}


def test_higher_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("idle", -5)):
        add(engine, name, 4, priority=priority)
    assert list(run_to_end(engine)) == ["urgent", "a", "b", "idle"]


def test_groups_run_by_priority_and_each_as_a_whole() -> None:
    engine, _ = make_engine(max_num_seqs=5)
    engine.add_request(EngineRequest("low", [1, 2], SamplingParams(n=2, max_tokens=9), priority=-1))
    make_step(engine)
    engine.add_request(EngineRequest("high", [3, 4], SamplingParams(n=3, max_tokens=9), priority=1))
    make_step(engine)
    assert make_step(engine)[0] == ["high"] * 3 + ["low"] * 2


def test_generated_blocks_are_cached_too() -> None:
    """The second turn of a conversation hits the first turn's answer."""
    engine, _ = make_engine(block_size=4)
    add(engine, "first", 8, max_tokens=9)
    answer = run_to_end(engine)["first"]
    group = engine.add_request(EngineRequest("second", [*range(8), *answer, 1, 2, 3], SamplingParams(max_tokens=1)))
    run_to_end(engine)
    assert group.sequences[0].num_cached_tokens == 16


def test_the_log_says_what_sharing_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt of 16 tokens and two answers of 4, in blocks of 4: both hold 5, of which 4 are the same."""
    caplog.set_level(logging.INFO, logger="engine.observability.sharing_log")
    engine, _ = make_engine(block_size=4)
    engine.add_request(EngineRequest("two", list(range(16)), SamplingParams(n=2, max_tokens=4)))
    add(engine, "one", 16)
    run_to_end(engine)
    assert [record.getMessage() for record in caplog.records] == [
        "request two: sharing saved 4 of the 10 KV blocks of its answers (40%)"
    ]


@pytest.mark.parametrize("options", [{}, {"windows": ((8, 40),)}, {"num_slots": 12}], ids=str)
def test_a_request_whose_forking_step_fails_can_be_aborted(options: dict[str, Any]) -> None:
    """Its forks are in the request before they are in the batch."""
    engine, runner = make_engine(**options)
    engine.add_request(EngineRequest("several", list(range(9)), SamplingParams(n=3, temperature=1, max_tokens=5)))

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    run, runner.run = runner.run, fail  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.abort("several")
    check_integrity(engine)
    assert not engine.has_unfinished
    runner.run = run  # type: ignore[method-assign]
    engine.add_request(EngineRequest("again", list(range(9)), SamplingParams(n=3, temperature=1, max_tokens=5)))
    assert len(run_all_to_end(engine)) == 3
