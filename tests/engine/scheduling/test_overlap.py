"""Steps that are scheduled while the one before is in flight: what they compute, drop and wait for."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import Engine
from engine.outputs import FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence
from tests.engine.shadow import ShadowRunner, check_integrity, make_engine, run_all_to_end

PROMPT = [1, 2, 3, 4, 5]


def overlapping(**options: Any) -> tuple[Engine, ShadowRunner, list[SchedulerOutput]]:
    """Return an engine, its runner, and a list that grows by each batch that is launched."""
    engine, runner = make_engine(async_scheduling=True, **options)
    launched: list[SchedulerOutput] = []
    start = runner.start

    def record(output: SchedulerOutput) -> Any:
        launched.append(output)
        return start(output)

    runner.start = record  # type: ignore[method-assign]
    return engine, runner, launched


def add(engine: Engine, request_id: str = "a", prompt: list[int] = PROMPT, **params: Any) -> None:
    engine.add_request(EngineRequest(request_id, prompt, SamplingParams(**params)))


def test_a_step_returns_the_tokens_of_the_one_before() -> None:
    engine, runner, launched = overlapping()
    add(engine, max_tokens=3)
    expected = runner.answer(PROMPT, 3)
    steps = [[output.token_ids for output in engine.step()] for _ in range(4)]
    assert steps == [[], [expected[:1]], [expected[1:2]], [expected[2:]]]
    assert not engine.has_unfinished
    assert [output.num_new_tokens for output in launched] == [[5], [1], [1]]


def test_an_end_by_length_wastes_nothing_and_one_by_a_token_wastes_one() -> None:
    engine, runner, launched = overlapping()
    stop = runner.answer(PROMPT, 6)[-1]
    add(engine, "length", max_tokens=4)
    add(engine, "stop", max_tokens=40, stop_token_ids=[stop])
    answers = run_all_to_end(engine)
    assert len(answers["length", 0]) == min(4, len(answers["stop", 0]))
    assert answers["stop", 0][-1] == stop
    assert sum(output.num_wasted for output in launched) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "beam_width": 2},
        {"repetition_penalty": 1.1},
        {"bad_words_token_ids": ((1, 2),)},
        {"frequency_penalty": 0.5},
    ],
)
def test_a_request_whose_tokens_the_host_needs_takes_part_in_every_other_step(params: dict[str, Any]) -> None:
    engine, _, launched = overlapping()
    add(engine, "steady", max_tokens=9)
    add(engine, "waits", prompt=[7, 8, 9], max_tokens=4, **params)
    run_all_to_end(engine)
    batches = [{sequence.request_id for sequence in output.sequences} for output in launched]
    assert batches[:4] == [{"steady", "waits"}, {"steady"}] * 2


def test_a_request_waits_if_it_may_get_drafts() -> None:
    engine, _, launched = overlapping(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    add(engine, max_tokens=3, temperature=1)
    run_all_to_end(engine)
    assert [len(output.sequences) for output in launched] == [1, 1, 1]
    assert [output.num_wasted for output in launched] == [0, 0, 0]


def test_a_request_that_is_aborted_in_flight_frees_its_blocks_at_once_and_gets_nothing() -> None:
    engine, _, launched = overlapping()
    add(engine, max_tokens=9)
    add(engine, "other", prompt=[9, 9], max_tokens=2)
    engine.step()
    engine.step()
    num_free = engine.block_manager.num_free_blocks
    assert engine.abort("a")
    assert engine.block_manager.num_free_blocks == num_free + 2
    check_integrity(engine)
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["other"]
    assert launched[1].num_wasted == 1
    run_all_to_end(engine)


def test_a_request_that_is_aborted_with_drafts_in_flight_frees_its_states() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    engine, _, launched = overlapping(num_slots=6, speculative_config=drafts)
    add(engine, prompt=[1, 2, 1, 2, 1, 2], max_tokens=9, temperature=0)
    engine.scheduler.drafter.proposers = {"test": _SameToken()}  # type: ignore[union-attr]
    while not (launched and launched[-1].drafts):
        engine.step()
    assert engine.abort("a")
    check_integrity(engine)
    engine.step()
    assert not engine.has_unfinished
    check_integrity(engine)


class _SameToken(Proposer):
    """Proposes the same token always."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        return [0] * limit


def test_an_engine_without_requests_still_collects_its_last_step() -> None:
    engine, _, _ = overlapping()
    add(engine, max_tokens=9)
    engine.step()
    engine.abort("a")
    assert engine.has_unfinished
    assert not len(engine.step())
    assert not engine.has_unfinished
    check_integrity(engine)


def test_an_answer_that_is_ended_in_flight_leaves_its_siblings() -> None:
    engine, runner, launched = overlapping()
    add(engine, max_tokens=5, n=3)
    for _ in range(3):
        engine.step()
    assert engine.end_sequence("a", 1, FinishReason.STOP)
    check_integrity(engine)
    answers = run_all_to_end(engine)
    assert answers["a", 2] == runner.answer(PROMPT, 5, index=2)[2:]
    assert ("a", 1) not in answers
    assert sum(output.num_wasted for output in launched) == 1


def test_nothing_is_preempted_before_the_step_in_flight_has_ended() -> None:
    """Of two sequences that fill the pool, the first one's end makes room."""
    engine, _, launched = overlapping(num_blocks=4, block_size=4, enable_prefix_caching=False)
    scheduled: list[SchedulerOutput] = []
    schedule = engine.scheduler.schedule

    def record() -> SchedulerOutput:
        scheduled.append(schedule())
        return scheduled[-1]

    engine.scheduler.schedule = record  # type: ignore[method-assign]
    add(engine, "ends", prompt=[1, 2, 3, 4, 5], max_tokens=2)
    add(engine, "grows", prompt=[6, 7, 8, 9, 10, 11, 12], max_tokens=6)
    run_all_to_end(engine)
    assert any(output.lacks_blocks for output in scheduled)
    assert not any(output.preempted for output in launched)


def test_a_step_that_fails_leaves_none_in_flight() -> None:
    engine, runner, _ = overlapping()
    add(engine, max_tokens=9)
    engine.step()
    engine.step()
    launched = engine._in_flight
    assert launched is not None

    def fail(times: StepTimes) -> Any:
        raise RuntimeError("the device is lost")

    launched.in_flight.finish = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step()
    assert engine._in_flight is None
    engine.abort("a")
    assert not engine.has_unfinished
    check_integrity(engine)
    add(engine, "next", max_tokens=4)
    assert run_all_to_end(engine)["next", 0] == runner.answer(PROMPT, 4)


@pytest.mark.parametrize(
    ("device", "options", "overlaps"),
    [
        ("cpu", {}, False),
        ("cpu", {"async_scheduling": True}, True),
        ("cuda:0", {}, True),
        ("cuda:0", {"num_slots": 3}, True),
        ("cuda:0", {"async_scheduling": False}, False),
        ("cuda:0", {"tensor_parallel_size": 2}, False),
        ("cuda:0", {"tensor_parallel_size": 2, "async_scheduling": True}, False),
    ],
)
def test_steps_overlap_on_one_gpu_or_where_the_option_says_so(
    device: str, options: dict[str, Any], overlaps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = make_engine(device=device, **options)
    assert engine._overlaps_steps is overlaps
    is_overruled = bool(options.get("async_scheduling")) and not overlaps
    assert ("async_scheduling is off with tensor_parallel_size=2" in caplog.text) is is_overruled
