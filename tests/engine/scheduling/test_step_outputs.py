"""The outputs of steps: what comes with which output, and the best answers at the end."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.outputs import EngineOutput, FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.shadow import ShadowRunner, make_engine
from tests.engine.shadow_model import token_logprob

PROMPT = [1, 2, 3]
ENDS = list(range(0, 64, 3))  # token ids that end some beams of a search, and not others


def outputs_of(params: SamplingParams, **options: int) -> tuple[list[EngineOutput], ShadowRunner]:
    """Return all outputs of a request that is alone."""
    engine, runner = make_engine(**options)  # type: ignore[arg-type]
    engine.add_request(EngineRequest("a", PROMPT, params))
    return _run(engine), runner


def _run(engine: Engine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def test_the_first_and_the_last_output_have_the_times() -> None:
    outputs, _ = outputs_of(SamplingParams(max_tokens=4))
    assert [output.timing is not None for output in outputs] == [True, False, False, True]
    assert [output.is_last for output in outputs] == [False, False, False, True]
    first, last = outputs[0].timing, outputs[-1].timing
    assert first is not None
    assert last is not None
    assert (first.decode_s, last.prefill_s) == (0.0, first.prefill_s)


def test_each_answer_has_the_times_with_its_first_output() -> None:
    outputs, _ = outputs_of(SamplingParams(n=2, max_tokens=3))
    for index in range(2):
        times = [output.timing is not None for output in outputs if output.index == index]
        assert times == [True, False, index == 1]


def test_log_probabilities_come_with_their_tokens_and_add_up() -> None:
    outputs, runner = outputs_of(SamplingParams(logprobs=1, max_tokens=4))
    chain = runner.ids.chain("", PROMPT + runner.answer(PROMPT, 4))
    total = 0.0
    for output, prefix in zip(outputs, chain[len(PROMPT) - 1 :], strict=False):
        assert output.logprobs is not None
        assert [list(position) for position in output.logprobs] == [output.token_ids]
        assert output.logprobs[0][output.token_ids[0]].logprob == token_logprob(prefix)
        total += token_logprob(prefix)
        assert output.cumulative_logprob == pytest.approx(total)


def test_no_log_probabilities_come_unasked() -> None:
    for params in (SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, n=2, best_of=3)):
        outputs, _ = outputs_of(params)
        assert {output.logprobs is None for output in outputs} == {True}
        assert {output.prompt_logprobs is None for output in outputs} == {True}


@pytest.mark.parametrize("best_of", [None, 3])
def test_log_probabilities_of_the_prompt_come_once(best_of: int | None) -> None:
    outputs, _ = outputs_of(SamplingParams(prompt_logprobs=0, n=2, best_of=best_of, max_tokens=3))
    with_prompt = [output for output in outputs if output.prompt_logprobs is not None]
    assert [output.index for output in with_prompt] == [0]
    assert with_prompt[0] is next(output for output in outputs if output.index == 0)
    assert with_prompt[0].prompt_logprobs is not None
    assert [prompt_logprob and list(prompt_logprob) for prompt_logprob in with_prompt[0].prompt_logprobs] == [
        None,
        [2],
        [3],
    ]


def test_the_best_of_several_answers_are_those_with_the_highest_mean() -> None:
    """They come whole, the best first, and the last of them ends the request."""
    everything, runner = outputs_of(SamplingParams(n=5, logprobs=0, max_tokens=4))
    assert runner.num_steps == 4
    totals = {output.index: output.cumulative_logprob or 0.0 for output in everything}  # of its last output
    best = sorted(totals.values(), reverse=True)[:3]
    outputs, _ = outputs_of(SamplingParams(n=3, best_of=5, logprobs=0, max_tokens=4))
    assert [output.cumulative_logprob for output in outputs] == pytest.approx(best)
    assert [(output.index, len(output.token_ids), len(output.logprobs or ())) for output in outputs] == [
        (0, 4, 4),
        (1, 4, 4),
        (2, 4, 4),
    ]
    assert [output.is_last for output in outputs] == [False, False, True]


def test_the_hypotheses_of_a_search_say_their_scores_and_what_ended_them() -> None:
    params = SamplingParams(temperature=0, beam_width=4, n=4, max_tokens=6, stop_token_ids=ENDS)
    outputs, runner = outputs_of(params)
    expected = runner.search(PROMPT, params, len(PROMPT) + 6)
    assert {output.ended_by_token for output in expected} == {True, False}, "one kind of end is not tested"
    for output, hypothesis in zip(outputs, expected, strict=True):
        assert output.token_ids == hypothesis.token_ids
        assert output.cumulative_logprob == pytest.approx(hypothesis.cumulative_logprob)
        if hypothesis.ended_by_token:
            assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, output.token_ids[-1])
        else:
            assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)


def test_a_search_that_the_models_own_token_ends_has_no_stop_reason() -> None:
    """It would be one of the request's ``stop_token_ids``."""
    engine, _ = make_engine(eos_token_ids=tuple(ENDS))
    engine.add_request(EngineRequest("a", PROMPT, SamplingParams(temperature=0, beam_width=4, n=4, max_tokens=6)))
    outputs = _run(engine)
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP, FinishReason.LENGTH}
    assert {output.stop_reason for output in outputs} == {None}
