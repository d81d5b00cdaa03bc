"""POST /v1/responses: answers, whole and streamed, with the intent of the Open Responses compliance tests and more."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.errors import EngineDeadError
from tests.deployments.api.conftest import Answers
from tests.deployments.api.responses.conftest import PATH, post, stream
from tests.deployments.api.responses.official import check_events, check_response, events_of
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import INFO, FakeEngines, output

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f'<think>\nHmm.\n</think>\n\nLet me see.\n{CALL}\n<tool_call>{{"name": "g"}}</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"type": "function", "name": "g", "description": "Does g.", "strict": False},
]


def prompt(engines: FakeEngines, tokenizer: Any, number: int = -1) -> str:
    """Return the text of the prompt that an engine got."""
    text: str = tokenizer.decode(engines.calls[number][0].prompt_token_ids, skip_special_tokens=False)
    return text


def test_a_basic_answer(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], cached=4), output([71, 72], "stop", cached=4)]]
    response = check_response(post(client))
    assert (response.status, response.model, response.object) == ("completed", "tiny", "response")
    (message,) = response.output
    assert message.type == "message"
    assert message.role == "assistant"
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    assert response.id.startswith("resp_")
    assert len(response.id) == 37


def test_the_order_of_events(client: TestClient) -> None:
    kinds = [event["type"].removeprefix("response.") for event in stream(client)]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_the_response_repeats_the_request(client: TestClient) -> None:
    repeated: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 2,
        "temperature": 0.25,
        "top_p": 0.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "safety_identifier": "me",
        "store": False,
        "truncation": "disabled",
        "user": "you",
    }
    asked = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "service_tier": "auto"}
    body = post(client, **repeated, **asked)
    assert body | repeated == body
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (body["service_tier"], body["background"]) == ("default", False)


def test_the_defaults_of_the_model_are_shown(client: TestClient) -> None:
    body = post(client)
    assert (body["temperature"], body["top_p"], body["tool_choice"], body["tools"]) == (0.5, 1.0, "auto", [])
    assert (body["store"], body["metadata"], body["truncation"]) == (True, {}, "disabled")


def test_a_system_prompt(client: TestClient, engines: FakeEngines, tokenizer: Any) -> None:
    post(client, instructions="Talk like a pirate.", input=[{"role": "user", "content": "Hi"}])
    post(client, input=[{"role": "system", "content": "Talk like a pirate."}, {"role": "user", "content": "Hi"}])
    prompts = [call[0].prompt_token_ids for call in engines.calls]
    assert prompts[0] == prompts[2]
    assert len(prompts[0]) > 10


def test_limits_end_a_response_as_incomplete(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70, 71], "length")]]
    body = post(client, max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert stream(client, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([2], "stop")]]
    (item,) = post(client)["output"]
    assert item["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": ""}]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_reasoning_text_and_calls(parsed: TestClient, answers: Answers, size: int) -> None:
    answers(ANSWER, size=size)
    body = post(parsed, tools=TOOLS, max_output_tokens=90)
    reasoning, message, *calls = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"a": 1}'), ("g", "{}")]
    ids = [call["call_id"] for call in calls]
    assert all(call_id.startswith("call_") for call_id in ids)
    assert len({*ids, *(item["id"] for item in body["output"])}) == 6
    assert [tool["strict"] for tool in body["tools"]] == [None, False]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_tokens_of_reasoning_are_counted(parsed: TestClient, answers: Answers, tokenizer: Any, size: int) -> None:
    answers("<think>Hmm.</think>\n\nHello.", size=size)
    usage = post(parsed)["usage"]
    expected = len(tokenizer.encode("<think>Hmm.</think>", add_special_tokens=False))
    assert usage["output_tokens_details"]["reasoning_tokens"] == expected
    answers("Hello.")
    assert post(parsed)["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_arguments_are_streamed(parsed: TestClient, answers: Answers) -> None:
    answers(CALL)
    events = stream(parsed, tools=TOOLS, max_output_tokens=90)
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 2


def test_a_truncated_call_is_incomplete(parsed: TestClient, answers: Answers) -> None:
    answers(CALL[: CALL.index(": 1") + 1], finish_reason="length")
    body = post(parsed, tools=TOOLS, max_output_tokens=90)
    (call,) = body["output"]
    assert (body["status"], call["status"], call["arguments"]) == ("incomplete", "incomplete", '{"a":')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_forced_calls(parsed: TestClient, answers: Answers, engines: FakeEngines, choice: Any) -> None:
    answers('{"a": 1}' if isinstance(choice, dict) else '[{"name": "f", "arguments": {"a": 1}}]')
    body = post(parsed, tools=TOOLS, tool_choice=choice, max_output_tokens=90)
    (call,) = body["output"]
    assert (call["name"], call["arguments"], body["tool_choice"]) == ("f", '{"a": 1}', choice)
    assert engines.calls[0][0].params.structured_outputs is not None


def test_allowed_tools(parsed: TestClient, answers: Answers, engines: FakeEngines, tokenizer: Any) -> None:
    answers('[{"name": "g", "arguments": {}}]')
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    body = post(parsed, tools=TOOLS, tool_choice=choice, max_output_tokens=90)
    assert [call["name"] for call in body["output"]] == ["g"]
    assert (len(body["tools"]), body["tool_choice"]) == (2, choice)
    assert '"name": "f"' not in prompt(engines, tokenizer)


def test_log_probabilities_of_the_whole_vocabulary(open_client: OpenClient, engines: FakeEngines) -> None:
    engines.engine_info = replace(INFO, max_logprobs=-1)
    client = open_client()
    engines.scripts = [[output([70], "stop", logprobs=[-0.5])]]
    body = post(client, include=["message.output_text.logprobs"], top_logprobs=-1)
    assert (body["top_logprobs"], engines.calls[0][0].params.logprobs) == (-1, -1)
    assert len(body["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]) == 1  # all that the engine sent


def test_log_probabilities(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], logprobs=[-0.5]), output([71, 2], "stop", logprobs=[-0.25, -1.0])]]
    body = post(client, include=["message.output_text.logprobs"], top_logprobs=1)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert [position["logprob"] for position in logprobs] == [-0.5, -0.25]  # none of the end of the answer
    assert "".join(position["token"] for position in logprobs) == body["output"][0]["content"][0]["text"]
    assert [len(position["top_logprobs"]) for position in logprobs] == [1, 1]
    assert engines.calls[0][0].params.logprobs == 1
    refused = client.post(
        "/v1/responses", json={"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": -1}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
    assert "the limit of 20" in refused.json()["error"]["message"]
    assert post(client)["output"][0]["content"][0]["logprobs"] == []


def test_log_probabilities_are_those_of_the_message(parsed: TestClient, engines: FakeEngines, tokenizer: Any) -> None:
    ids = tokenizer.encode("<think>Hm</think>Hello", add_special_tokens=False)
    engines.scripts = [
        [*(output([token_id], logprobs=[-1.0]) for token_id in ids), output([2], "stop", logprobs=[-1.0])]
    ]
    message = post(parsed, include=["message.output_text.logprobs"], max_output_tokens=90)["output"][1]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(position["token"] for position in logprobs) == "Hello"


def test_the_form_of_the_text(client: TestClient, engines: FakeEngines) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = post(client, text={"format": form})
    assert body["text"]["format"] == form | {"description": None}
    params = engines.calls[0][0].params.structured_outputs
    assert params is not None
    assert json.loads(str(params.json)) == schema
    post(client, text={"format": {"type": "json_object"}})
    params = engines.calls[-1][0].params.structured_outputs
    assert params is not None
    assert params.json_object


def test_parameters_of_vllm(client: TestClient, engines: FakeEngines) -> None:
    hint = {"prompt_cache_retention": "24h"}
    post(client, top_k=3, min_p=0.1, seed=7, stop=["x"], cache_salt="salt", priority=2, min_tokens=1, **hint)
    request = engines.calls[0][0]
    assert request.retention == 3
    assert (request.params.top_k, request.params.min_p, request.params.seed) == (3, 0.1, 7)
    assert (request.cache_salt, request.priority) == ("salt", 2)


def test_a_stream_that_fails_ends_with_the_error(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70]), EngineDeadError("lost")], [EngineDeadError("lost")]]
    events = stream(client)
    failed = check_events(events)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "lost" in failed["error"]["message"]
    assert [item["status"] for item in failed["output"]] == ["incomplete"]
    assert [event["type"] for event in events].count("response.failed") == 1


def test_an_error_before_the_first_event_has_a_status(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[EngineDeadError("lost")]]
    for streamed in (False, True):
        answer = client.post(PATH, json={"input": "Hi", "stream": streamed})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "replica_lost"


def test_text_that_utf8_cannot_hold_is_repeated(client: TestClient) -> None:
    tools = '[{"type": "function", "name": "f", "parameters": {"description": "\\ud800"}}]'
    for streamed in ("false", "true"):
        body = f'{{"input": "Hi", "tools": {tools}, "tool_choice": "none", "stream": {streamed}}}'
        answer = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        response = answer.json() if streamed == "false" else events_of(answer.text)[-1]["response"]
        assert response["tools"][0]["parameters"] == {"description": "\ud800"}
        assert client.get(f"{PATH}/{response['id']}").json() == response
