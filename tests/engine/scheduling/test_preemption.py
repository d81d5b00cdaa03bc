"""Preemption: which requests are preempted, and that they lose no token."""

from __future__ import annotations

import pytest

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.step_outputs import step_outputs
from engine.sequence import SequenceStatus
from tests.engine.scheduling.steps import add
from tests.engine.shadow import check_integrity, make_engine, run_to_end


def test_the_lowest_priority_then_the_latest_arrival_is_preempted() -> None:
    engine, _ = make_engine(num_blocks=6, block_size=4, enable_prefix_caching=False)
    add(engine, "low", 7, max_tokens=8, priority=-1)
    add(engine, "early", 7, max_tokens=8, first=10)
    add(engine, "late", 7, max_tokens=8, first=20)
    preempted: list[str] = []
    while engine.has_unfinished:
        output = engine.scheduler.schedule()
        preempted += [sequence.request_id for sequence in output.preempted]
        engine.scheduler.update(output, engine.runner.run(output, None))  # type: ignore[arg-type]
        check_integrity(engine)
    assert preempted[0] == "low"
    assert "early" not in preempted


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_loses_no_token_and_recomputes_at_the_right_positions(caching: bool) -> None:
    engine, runner = make_engine(num_blocks=8, block_size=4, enable_prefix_caching=caching)
    for i in range(4):
        add(engine, str(i), 9, max_tokens=20, first=i)
    answers = run_to_end(engine)
    for i in range(4):
        assert answers[str(i)] == runner.answer([(i + j) % 64 for j in range(9)], 20)


def test_tokens_that_a_preempted_request_finds_in_the_cache_do_not_count_as_cached() -> None:
    """They are its own, computed before the preemption."""
    engine, _ = make_engine(num_blocks=8, block_size=4)
    for i in range(4):
        add(engine, str(i), 9, max_tokens=12, first=10 * i)
    num_found, num_cached = 0, set()
    while engine.has_unfinished:
        num_cached |= {output.num_cached_tokens for output in engine.step()}
        num_found += sum(sequence.num_matched_tokens for sequence in engine.scheduler.running)
    assert num_found
    assert num_cached == {0}


@pytest.mark.parametrize("num_host_blocks", [20, 2, 0])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "params", [SamplingParams(n=3, max_tokens=12), SamplingParams(temperature=0, beam_width=3, n=3, max_tokens=12)]
)
def test_a_group_is_preempted_and_resumes_as_a_whole(
    params: SamplingParams, caching: bool, num_host_blocks: int
) -> None:
    """It is swapped to the host pool while that has room for all of it, else computed again."""
    engine, runner = make_engine(
        num_blocks=16, num_host_blocks=num_host_blocks, block_size=2, enable_prefix_caching=caching
    )
    add(engine, "first", 7, max_tokens=24)
    group = engine.add_request(EngineRequest("group", [60, 61, 62], params))
    preempted = []
    outputs_by_index: dict[int, list[int]] = {}
    while engine.has_unfinished:
        output = engine.scheduler.schedule()
        preempted += [(victim, victim.status) for victim in output.preempted]
        updated = engine.scheduler.update(output, runner.run(output, None))  # type: ignore[arg-type]
        for hypotheses in step_outputs(updated, {}):
            if hypotheses.request_id == "group":
                outputs_by_index.setdefault(hypotheses.index, []).extend(hypotheses.token_ids)
        check_integrity(engine)
    assert {victim for victim, _ in preempted} == {group}
    expected = SequenceStatus.SWAPPED if num_host_blocks == 20 else SequenceStatus.WAITING
    assert {status for _, status in preempted} == {expected}
    if group.beams is None:
        count = group.max_total_tokens - 3
        assert outputs_by_index == {index: runner.answer([60, 61, 62], count, index=index) for index in range(3)}
    else:
        hypotheses = runner.search([60, 61, 62], params, group.max_total_tokens)
        assert outputs_by_index == {index: hypotheses[index].token_ids for index in range(3)}
