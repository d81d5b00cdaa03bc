"""EngineOutput: what each output holds, which one is the last, and which of several answers are the best."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.outputs import EngineOutput, FinishReason, RequestTiming, StepOutputs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.answer_checks import NO_CHOICE
from tests.engine.random_load import RandomLoad
from tests.engine.random_requests import Arrival
from tests.engine.shadow import make_engine
from tests.engine.shadow_model import token_logprob

PROMPT = [3, 1, 4, 1, 5]


def outputs_of(engine: Engine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=5, n=3),
        SamplingParams(max_tokens=1, n=3),
        SamplingParams(max_tokens=30, n=3, stop_token_ids=list(range(0, 64, 4))),
        SamplingParams(max_tokens=5, n=2, best_of=4),
        SamplingParams(max_tokens=5, temperature=0, beam_width=3, n=2),
        SamplingParams(max_tokens=1, temperature=0, beam_width=3, n=3),
    ],
    ids=repr,
)
def test_a_request_has_exactly_one_last_output_and_each_answer_one_end(params: SamplingParams) -> None:
    engine, _ = make_engine()
    engine.add_request(EngineRequest("a", PROMPT, params))
    outputs = outputs_of(engine)
    assert [output.is_last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert sorted(output.index for output in outputs if output.finish_reason) == list(range(params.n))


def test_the_last_output_comes_with_the_last_answer_however_the_others_end() -> None:
    engine, _ = make_engine()
    engine.add_request(EngineRequest("a", PROMPT, SamplingParams(max_tokens=5, n=3)))
    engine.step()
    assert engine.end_sequence("a", 2)
    outputs = outputs_of(engine)
    assert {output.index for output in outputs} == {0, 1}
    assert sum(output.is_last for output in outputs) == 1
    assert outputs[-1].is_last


def test_best_of_returns_the_answers_of_the_best_mean_logprob_the_best_first() -> None:
    engine, runner = make_engine()
    stops = list(range(0, 64, 8))  # so that lengths differ, and a sum ranks otherwise than a mean
    engine.add_request(EngineRequest("a", PROMPT, SamplingParams(max_tokens=30, n=2, best_of=6, stop_token_ids=stops)))
    outputs = outputs_of(engine)
    ranked = []
    for index in range(6):
        answer = runner.answer(PROMPT, 30, index=index)
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), 30)
        chain = runner.ids.chain("", PROMPT + answer[:end])[len(PROMPT) - 1 : -1]
        total = sum(token_logprob(prefix, index) for prefix in chain)
        ranked.append((total / end, total, answer[:end]))
    ranked.sort(key=lambda pair: -pair[0])
    assert [output.token_ids for output in outputs] == [answer for _, _, answer in ranked[:2]]
    assert [output.cumulative_logprob for output in outputs] == pytest.approx([total for _, total, _ in ranked[:2]])
    assert [output.index for output in outputs] == [0, 1]


def test_hypotheses_come_by_score() -> None:
    engine, runner = make_engine()
    params = SamplingParams(max_tokens=6, temperature=0, beam_width=4, n=3, length_penalty=0.0, stop_token_ids=[1, 2])
    group = engine.add_request(EngineRequest("a", PROMPT, params))
    outputs = outputs_of(engine)
    hypotheses = runner.search(PROMPT, params, group.max_total_tokens)
    assert [output.token_ids for output in outputs] == [hypothesis.token_ids for hypothesis in hypotheses[:3]]
    scores = [output.cumulative_logprob for output in outputs]
    assert scores == sorted(scores, reverse=True)  # without a length penalty the sum is the score
    for output in outputs:
        ended = output.token_ids[-1] in (1, 2)
        assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert output.stop_reason == (output.token_ids[-1] if ended else None)


def test_a_failed_answer_ends_without_a_token_and_the_others_go_on() -> None:
    load = RandomLoad()
    load.add(Arrival(tokens=PROMPT, params=SamplingParams(max_tokens=4, n=2)))
    load.step()
    load.fail_next(1)
    outputs = outputs_of(load.engine)
    failed = next(output for output in outputs if output.finish_reason is FinishReason.ABORT)
    assert (failed.index, failed.token_ids, failed.stop_reason, failed.is_last) == (1, [], NO_CHOICE, False)
    assert [output.index for output in outputs if output.is_last] == [0]


def test_a_failed_answer_is_the_worst_of_several() -> None:
    load = RandomLoad()
    load.add(Arrival(tokens=PROMPT, params=SamplingParams(max_tokens=4, n=2, best_of=3)))
    load.step()
    load.fail_next(0)
    outputs = outputs_of(load.engine)
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 2


def test_prompt_logprobs_come_once_with_the_first_token_of_the_first_answer() -> None:
    engine, _ = make_engine(max_num_batched_tokens=3)
    engine.add_request(EngineRequest("a", PROMPT, SamplingParams(max_tokens=3, n=2, prompt_logprobs=0)))
    with_logprobs = [output for output in outputs_of(engine) if output.prompt_logprobs is not None]
    assert [output.index for output in with_logprobs] == [0]
    assert with_logprobs[0].prompt_logprobs is not None
    assert [prompt_logprob and list(prompt_logprob) for prompt_logprob in with_logprobs[0].prompt_logprobs] == [
        None,
        [1],
        [4],
        [1],
        [5],
    ]


def test_prompt_logprobs_of_a_resumed_request_come() -> None:
    engine, _ = make_engine()
    engine.queue_request(
        EngineRequest("a", PROMPT, SamplingParams(max_tokens=5, prompt_logprobs=0), output_token_ids=[4, 5])
    )
    logprobs = [output.prompt_logprobs for output in outputs_of(engine)]
    assert [positions and len(positions) for positions in logprobs] == [len(PROMPT), None, None]


def test_prompt_logprobs_of_a_request_without_a_token_come() -> None:
    load = RandomLoad()
    load.add(Arrival(tokens=PROMPT, params=SamplingParams(max_tokens=4, prompt_logprobs=0)))
    load.fail_next(0)
    (output,) = outputs_of(load.engine)
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.ABORT)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_prompt_logprobs_do_not_come_again_with_a_later_failure() -> None:
    load = RandomLoad()
    load.add(Arrival(tokens=PROMPT, params=SamplingParams(max_tokens=4, prompt_logprobs=0)))
    load.step()
    load.fail_next(0)
    (output,) = outputs_of(load.engine)
    assert output.finish_reason is FinishReason.ABORT
    assert output.prompt_logprobs is None


def test_joined_outputs_keep_the_latest_timing() -> None:
    """The first output of an answer has one, and the last output of a request; those between have none."""
    first, last = RequestTiming(0.1, 0.2), RequestTiming(0.1, 0.2, 0.3)
    outputs = [EngineOutput("a", 0, [1], timing=first), EngineOutput("a", 0, [2]), EngineOutput("a", 0, [3])]
    assert EngineOutput.join(outputs).timing == first
    assert EngineOutput.join([*outputs, EngineOutput("a", 0, [4], timing=last)]).timing == last
    assert EngineOutput.join(outputs[1:]).timing is None


def test_a_plain_token_that_joins_the_first_output_keeps_the_number_of_cached_tokens() -> None:
    """Both come at once where a batch was collected in the step that launched it."""
    step, later = StepOutputs(), StepOutputs()
    step.others.append(EngineOutput("a", 0, [1], num_cached_tokens=8))
    later.request_ids.append("a")
    later.token_ids.append(2)
    step.extend(later)
    joined = EngineOutput.join(list(step))
    assert (joined.token_ids, joined.num_cached_tokens) == ([1, 2], 8)
