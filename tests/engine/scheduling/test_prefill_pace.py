"""PrefillPace: prefills beside decodes, so that the decodes hardly wait."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.prefill_pace import PrefillPace
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from tests.engine.scheduling.steps import add, step_sizes
from tests.engine.shadow import make_engine, run_to_end


def paced_engine(slowdown: float = 1.5, **options: Any) -> Engine:
    """An engine on a machine where a step computes 10 tokens in the time of one."""
    options = {"target_inter_token_ms": None} | options
    return make_engine(num_blocks=600, free_tokens=10, max_decode_slowdown=slowdown, **options)[0]


def test_a_long_prompt_beside_decodes_is_chunked_so_that_they_hardly_wait() -> None:
    engine = paced_engine()
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    add(engine, "long", 100, first=30)
    assert [step_sizes(engine) for _ in range(3)] == [{"decoding": 1, "long": 14}] * 3


def chunks(engine: Engine, request_id: str) -> list[int]:
    """Step to the end; return how many tokens a request computes in each of its steps."""
    seen: list[int] = []
    schedule = engine.scheduler.schedule

    def record() -> SchedulerOutput:
        output = schedule()
        pairs = zip(output.sequences, output.num_new_tokens, strict=True)
        seen.extend(count for sequence, count in pairs if sequence.request_id == request_id)
        return output

    engine.scheduler.schedule = record  # type: ignore[method-assign]
    run_to_end(engine)
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_the_chunks_of_a_prompt_beside_a_decode_are_the_same_with_overlapping_steps(overlap: bool) -> None:
    engine = paced_engine(async_scheduling=overlap)
    add(engine, "decoding", 4, max_tokens=30)
    engine.step()
    add(engine, "long", 100, max_tokens=3, first=30)
    assert chunks(engine, "long") == [14] * 7 + [2, 1, 1]


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    engine = paced_engine(max_num_batched_tokens=64)
    add(engine, "long", 200)
    assert [step_sizes(engine)["long"] for _ in range(4)] == [64, 64, 64, 8]


def test_more_decodes_leave_more_room() -> None:
    engine = paced_engine(max_num_seqs=64)
    for i in range(20):
        add(engine, f"decoding{i}", 1, max_tokens=30, first=i)
    step_sizes(engine)
    add(engine, "long", 100, first=30)
    assert step_sizes(engine)["long"] == 10  # of 1.5 times 20


def test_a_lone_stream_hardly_delays_a_crowd_of_prompts() -> None:
    engine = paced_engine(max_num_seqs=64)
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    for i in range(10):
        add(engine, f"prompt{i}", 30, first=100 + i)
    assert step_sizes(engine) == {"decoding": 1} | {f"prompt{i}": 30 for i in range(4)} | {"prompt4": 8}  # 128 tokens


def test_a_crowd_of_prompts_gets_more_tokens_where_more_are_free() -> None:
    assert PrefillPace(free_tokens=50, slowdown=1.5).step_tokens(num_decodes=4, num_prefills=5) == 4 + 600


def test_a_crowd_of_prompts_gets_no_fewer_tokens_than_a_few() -> None:
    pace = PrefillPace(free_tokens=10, slowdown=20.0)
    assert pace.step_tokens(num_decodes=50, num_prefills=60) == pace.step_tokens(num_decodes=50, num_prefills=1) == 1000


def test_requests_that_wait_without_a_slot_are_no_crowd() -> None:
    engine = paced_engine(max_num_seqs=2)
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    for i in range(10):
        add(engine, f"prompt{i}", 30, first=100 + i)
    assert step_sizes(engine) == {"decoding": 1, "prompt0": 14}


def test_all_prompts_beside_decodes_are_computed() -> None:
    engine = paced_engine(slowdown=1.0)
    add(engine, "decoding", 4, max_tokens=400)
    step_sizes(engine)
    for i in range(6):
        add(engine, f"prompt{i}", 50, max_tokens=1, first=i)
    for _ in range(100):
        step_sizes(engine)
    assert engine.meter.stats().num_running == 1  # the decode; all prompts beside it are computed
    assert not engine.meter.stats().num_waiting


def test_a_request_for_many_answers_starts_beside_decodes() -> None:
    engine = paced_engine(max_num_seqs=64)
    add(engine, "decoding", 4, max_tokens=200)
    step_sizes(engine)
    engine.add_request(EngineRequest("many", [1, 2, 3], SamplingParams(n=40, max_tokens=2)))
    for _ in range(5):
        engine.step()
    assert "decoding" in engine._groups
    assert "many" not in engine._groups


def test_a_step_has_as_many_prefill_tokens_as_its_target_allows() -> None:
    pace = PrefillPace(free_tokens=10, slowdown=1.5, target_s=0.05)
    assert pace.step_tokens(num_decodes=4, num_prefills=1) == 15  # nothing is known yet
    pace.record_step(4, 0.002)  # as long as ten
    assert pace.step_tokens(num_decodes=4, num_prefills=1) == 250
    for _ in range(60):
        pace.record_step(100, 0.05)
    assert pace.step_tokens(num_decodes=4, num_prefills=1) == pytest.approx(100, abs=1)


def test_a_slow_model_is_limited_by_the_slowdown() -> None:
    pace = PrefillPace(free_tokens=10, slowdown=1.5, target_s=0.05)
    pace.record_step(16, 0.08)
    assert pace.step_tokens(num_decodes=16, num_prefills=1) == 24  # its decodes alone take longer than the target
    pace.record_step(0, 1.0)
    pace.record_step(16, 0.0)  # not measured
    assert pace.step_tokens(num_decodes=16, num_prefills=1) == 24


def test_one_slow_step_is_soon_forgotten() -> None:
    pace = PrefillPace(free_tokens=10, slowdown=1.5, target_s=0.05)
    for seconds in (0.01, 30.0, *[0.01] * 8):
        pace.record_step(100, seconds)
    assert pace.step_tokens(num_decodes=4, num_prefills=1) > 400
    for _ in range(10):
        pace.record_step(100, 1.0)
    assert pace.step_tokens(num_decodes=4, num_prefills=1) == 15  # lasting slowness is known as soon


def test_limits_of_any_size_are_limits() -> None:
    pace = PrefillPace(free_tokens=10, slowdown=sys.float_info.max, target_s=sys.float_info.max)
    pace.record_step(4, 0.002)
    assert pace.step_tokens(num_decodes=4, num_prefills=1) == 2**31


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_learns_what_its_steps_take(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "total", property(lambda times: 0.002))
    engine = paced_engine(target_inter_token_ms=50.0, async_scheduling=overlap)
    add(engine, "decoding", 4, max_tokens=90)
    for _ in range(40):
        engine.step()
    add(engine, "long", 400, max_tokens=1, first=30)
    first, *_ = chunks(engine, "long")
    assert first == 249  # of 250


@pytest.mark.parametrize(
    "options", [{"free_tokens": None}, {"free_tokens": 10, "max_decode_slowdown": None}], ids=["unmeasured", "off"]
)
def test_no_limit_where_nothing_was_measured_or_none_is_wanted(options: dict[str, Any]) -> None:
    engine, _ = make_engine(num_blocks=600, **options)
    add(engine, "decoding", 4, max_tokens=30)
    step_sizes(engine)
    add(engine, "long", 500, first=30)
    assert step_sizes(engine)["long"] == 500
