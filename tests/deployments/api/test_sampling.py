"""Sampling parameters: from the body of a request to the EngineRequest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.openai.protocol import CompletionRequest
from deployments.api.sampling import check_num_answers
from deployments.config import LimitOptions
from deployments.errors import as_api_error
from engine.errors import RequestError
from engine.outputs import Logprob
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import INFO, FakeEngines, output

PROMPT: dict[str, Any] = {"prompt": [20, 21, 22]}
ONE = Logprob(-1.0, 1)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}]}


def _params(client: TestClient, engines: FakeEngines, body: dict[str, Any]) -> list[SamplingParams]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [request.params for request, _ in engines.calls]


def test_every_parameter_reaches_the_engine(client: TestClient, engines: FakeEngines) -> None:
    asked = {
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "max_tokens": 9,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -5,
        "ignore_eos": True,
    }
    lists: dict[str, Any] = {
        "stop_token_ids": [5, 6],
        "allowed_token_ids": [30, 31],
        "logit_bias": {"70": -100, "71": 2.5},
    }
    (params,) = _params(client, engines, PROMPT | asked | lists)
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.stop_token_ids, params.allowed_token_ids) == ((5, 6), (30, 31))
    assert params.logit_bias == {70: -100.0, 71: 2.5}


def test_the_ingress_turns_bad_words_into_token_ids(client: TestClient, engines: FakeEngines) -> None:
    (params,) = _params(client, engines, CHAT | {"bad_words": ["cat", "dog"]})
    spellings = {bytes.fromhex("636174"), b"dog"}
    assert params.bad_words_token_ids is not None
    assert len(params.bad_words_token_ids) == 2 * len(spellings)  # with a space in front and without


def test_neutral_values_are_the_defaults(client: TestClient, engines: FakeEngines) -> None:
    neutral = {"n": 1, "best_of": 1, "logit_bias": {}, "bad_words": [], "echo": False}
    (params,) = _params(client, engines, PROMPT | neutral | {"response_format": {"type": "text"}})
    assert params == SamplingParams(temperature=0.5, seed=params.seed, logit_bias={})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": "1"}, "repetition_penalty"),
    ({"logit_bias": {"384": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": [384]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids"),
    ({"stop_token_ids": [384]}, "stop_token_ids"),
    ({"bad_words": "cat"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": ["x y z " * 100]}, "bad_words"),
    ({"bad_words": ["\ud800"]}, "bad_words"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [[5, True]]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": -1, "echo": True}, "logprobs"),
    ({"logprobs": 5, "top_logprobs": -2}, "top_logprobs"),
    ({"logprobs": 5, "echo": True, "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprobs": 5, "echo": True, "prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
    ({"prompt": [[5]] * 513, "n": 2}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_out_of_range_is_refused_by_name(
    client: TestClient, engines: FakeEngines, change: dict[str, Any], param: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=json.dumps(PROMPT | change), headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not engines.calls


REFUSED_IN_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -1, "max_tokens": 5}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"seed": 2**63}, "seed"),
    ({"n": -1}, "n"),
    ({"cache_salt": "\n"}, "cache_salt"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 100}]}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED_IN_CHAT, ids=lambda value: str(value)[:40])
def test_an_error_names_the_field_of_the_chat_request(
    client: TestClient, engines: FakeEngines, change: dict[str, Any], param: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/chat/completions", content=json.dumps(CHAT | change), headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert not engines.calls


def test_answers_are_limited_by_the_servers_options() -> None:
    limits = LimitOptions(max_n=4, max_best_of=2, max_prompts_per_request=8)
    check_num_answers(CompletionRequest(prompt=["a", "b"], n=4), 2, limits)  # best_of was not asked for
    for body, prompts, param in (({"n": 5}, 1, "n"), ({"n": 1, "best_of": 3}, 1, "best_of"), ({"n": 4}, 3, "prompt")):
        with pytest.raises(RequestError) as caught:
            check_num_answers(CompletionRequest(prompt=["a"], **body), prompts, limits)
        assert (as_api_error(caught.value).status, caught.value.param) == (400, param)


def test_infinity_is_refused(client: TestClient) -> None:
    for content in (b'{"prompt": "a", "logit_bias": {"1": 1e999}}', b'{"prompt": "a", "repetition_penalty": 1e999}'):
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400


def test_chat_logprobs_are_a_flag_and_a_number(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], "stop", logprobs=[-1.0])]]
    for body, number in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
    ):
        assert _params(client, engines, CHAT | body)[-1].logprobs == number
    assert client.post("/v1/chat/completions", json=CHAT | {"logprobs": 3}).status_code == 400
    refused = client.post("/v1/chat/completions", json=CHAT | {"logprobs": False, "top_logprobs": 3})
    assert refused.json()["error"]["param"] == "top_logprobs"


def test_each_answer_has_a_seed_of_its_own(client: TestClient, engines: FakeEngines) -> None:
    several = _params(client, engines, {"prompt": [[5], [6]], "n": 3, "seed": 2**63 - 2})
    assert [params.seed for params in several] == [2**63 - 2, 2**63 - 1, -(2**63)] * 2  # as 64 bits count
    assert {(params.n, params.best_of) for params in several} == {(1, None)}
    engines.calls.clear()
    drawn = _params(client, engines, {"prompt": [[5], [5]], "n": 2})
    assert len({params.seed for params in drawn}) == 4  # equal prompts are not equal draws


def test_a_scoring_request_is_one_token_for_the_engine(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], "length", logprobs=[-1.0], prompt_logprobs=[None, {21: ONE}, {22: ONE}])]]
    (params,) = _params(client, engines, PROMPT | {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0})
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, 1, 1)


def test_min_tokens_is_at_most_the_room_after_the_prompt(client: TestClient, engines: FakeEngines) -> None:
    room = INFO.max_model_len - len(PROMPT["prompt"])
    (params,) = _params(client, engines, PROMPT | {"min_tokens": INFO.max_model_len, "max_tokens": 10**6})
    assert (params.min_tokens, params.max_tokens) == (room, room)
