"""Sequence: what ends an answer, and what continues one that was generated elsewhere."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.outputs import EngineOutput, FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.scheduling.steps import add
from tests.engine.shadow import make_engine, run_to_end


def test_a_sequence_that_outgrows_the_pool_ends_with_reason_length() -> None:
    engine, _ = make_engine(num_blocks=4, block_size=4, max_model_len=100)
    add(engine, "grows", 10, max_tokens=90)
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert len(outputs) == 6  # 10 + 6 = 16 tokens


def test_the_context_ends_an_answer_with_reason_length() -> None:
    engine, _ = make_engine(max_model_len=12)
    engine.add_request(EngineRequest("a", [1] * 10, SamplingParams(max_tokens=None)))
    assert len(run_to_end(engine)["a"]) == 2


def test_an_eos_id_ends_the_answer_unless_ignored_or_too_early() -> None:
    prompt = [3, 1, 4]
    plain = make_engine()[1].answer(prompt, 10)
    eos = plain[4]
    expected_end = plain.index(eos) + 1
    engine, _ = make_engine(eos_token_ids=(eos,))
    engine.add_request(EngineRequest("stops", prompt, SamplingParams(max_tokens=10)))
    assert run_to_end(engine)["stops"] == plain[:expected_end]
    engine.add_request(EngineRequest("ignores", prompt, SamplingParams(max_tokens=10, ignore_eos=True)))
    assert run_to_end(engine)["ignores"] == plain


def test_stop_token_ids_say_which_one_stopped() -> None:
    prompt = [3, 1, 4]
    plain = make_engine()[1].answer(prompt, 10)
    engine, _ = make_engine()
    engine.add_request(EngineRequest("a", prompt, SamplingParams(max_tokens=10, stop_token_ids=[plain[2]])))
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].stop_reason == plain[2]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_stop_token_ends_the_answer_from_the_first_token_after_min_tokens() -> None:
    prompt = [3, 1, 4]
    plain = make_engine()[1].answer(prompt, 10)
    stop = plain[3]
    assert stop not in plain[:3]
    for min_tokens, length in ((0, 4), (3, 4)):
        engine, _ = make_engine()
        params = SamplingParams(max_tokens=10, min_tokens=min_tokens, stop_token_ids=[stop])
        engine.add_request(EngineRequest("a", prompt, params))
        assert len(run_to_end(engine)["a"]) == length
    engine, _ = make_engine()  # the fake model ignores the sampler's mask: the token comes, and does not end the answer
    engine.add_request(EngineRequest("a", prompt, SamplingParams(max_tokens=10, min_tokens=4, stop_token_ids=[stop])))
    assert len(run_to_end(engine)["a"]) > 4


def test_an_answer_continues_after_tokens_that_were_generated_elsewhere() -> None:
    """A request that lost its replica: lengths and limits include the tokens generated before."""
    engine, runner = make_engine()
    prompt = [3, 1, 4]
    plain = runner.answer(prompt, 10)
    params = SamplingParams(max_tokens=10, min_tokens=6, stop_token_ids=[plain[7]])
    group = engine.queue_request(EngineRequest("whole", prompt, params))
    whole = run_to_end(engine)["whole"]
    assert group.sequences[0].stop_reason == plain[7]
    engine.check_request(EngineRequest("a", prompt, params, output_token_ids=whole[:5]))
    engine.queue_request(EngineRequest("rest", prompt, params, output_token_ids=whole[:5]))
    assert run_to_end(engine)["rest"] == whole[5:]
    with pytest.raises(RequestError, match="max_tokens=5"):
        engine.check_request(EngineRequest("a", prompt, SamplingParams(max_tokens=5), output_token_ids=whole[:5]))
    with pytest.raises(RequestError, match="one answer"):
        engine.check_request(EngineRequest("a", prompt, SamplingParams(n=2), output_token_ids=whole[:5]))
    with pytest.raises(RequestError, match="output has the id 99"):
        engine.check_request(EngineRequest("a", prompt, params, output_token_ids=[99]))
