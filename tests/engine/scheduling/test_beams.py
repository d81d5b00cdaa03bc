"""Beam searches and requests for several answers, when one of their sequences fails or is ended from outside."""

from __future__ import annotations

import pytest

from engine.outputs import FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from tests.engine.scheduling.steps import add
from tests.engine.shadow import check_integrity, make_engine, run_all_to_end, run_to_end


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_beam_without_a_token_to_sample_ends_its_search_and_nothing_else(steps_before: int) -> None:
    """One NaN in one beam's logits ended the whole engine."""
    engine, runner = make_engine()
    engine.add_request(
        EngineRequest("beams", [1, 2, 3], SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=9))
    )
    add(engine, "other", 5, max_tokens=9)
    outputs = [output for _ in range(steps_before) for output in engine.step()]
    compute = runner.run

    def spoil(output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        sampled = compute(output, times)
        sampled.failed[min(sampled.beams)] = "the logits hold a NaN"
        return sampled

    runner.run = spoil  # type: ignore[method-assign]
    outputs += engine.step()
    check_integrity(engine)
    runner.run = compute  # type: ignore[method-assign]
    failed = [output for output in outputs if output.request_id == "beams"]
    assert [(output.index, output.token_ids, output.finish_reason, output.is_last) for output in failed] == [
        (0, [], FinishReason.ABORT, False),
        (1, [], FinishReason.ABORT, True),
    ]
    assert {output.stop_reason for output in failed} == {"the logits hold a NaN"}
    answer = [token_id for output in outputs if output.request_id == "other" for token_id in output.token_ids]
    assert answer + run_to_end(engine)["other"] == runner.answer(list(range(5)), 9)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0, beam_width=3, max_tokens=9), SamplingParams(n=1, best_of=3, max_tokens=9)],
)
def test_answers_that_come_at_the_end_cannot_be_ended_from_outside(params: SamplingParams) -> None:
    """A search that lost a beam ended the whole engine, and the best answer of several never came."""
    engine, _ = make_engine()
    engine.add_request(EngineRequest("a", [1, 2, 3], params))
    engine.step()
    engine.step()
    for index in range(3):
        assert not engine.end_sequence("a", index)
    assert len(run_to_end(engine)["a"]) == 9


def test_end_sequence_before_the_fork_is_ignored() -> None:
    """Ending answer 0 ended all without a last output; ending another did nothing."""
    engine, _ = make_engine(max_num_batched_tokens=4)
    group = engine.add_request(EngineRequest("a", list(range(6)), SamplingParams(n=3, max_tokens=5)))
    while not group.is_forked:  # in the queue, and in the middle of the prompt
        for index in range(3):
            assert not engine.end_sequence("a", index)
        engine.step()
    assert engine.end_sequence("a", 1)
    answers = run_all_to_end(engine)
    assert {index: len(tokens) for (_, index), tokens in answers.items()} == {0: 4, 2: 4}
