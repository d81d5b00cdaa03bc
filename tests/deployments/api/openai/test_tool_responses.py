"""Chat answers with tool calls and reasoning: whole and streamed say the same, in OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.requests.generation import Generation
from deployments.requests.prompt import Prompt
from engine.errors import EngineDeadError
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.conftest import MARKERS, Answers
from tests.deployments.api.openai.test_tool_requests import CHAT, NAMED, USER
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, events, output
from tests.deployments.parsers.shapes import call, parse, parser

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f'<think>\nHmm.\n</think>\n\nLet me see.\n{CALL}\n<tool_call>{{"name": "g"}}</tool_call>'
SMALL: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": name}} for name in ("f", "g")]}
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 90} | SMALL


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """Return the message that a choice's chunks add up to, as clients add them, and its finish_reason."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reasons = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("role", "content", "reasoning", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert set(piece) == {"index", "id", "type", "function"}
                    assert set(piece["function"]) == {"name", "arguments"}
                    calls.append(piece)
                else:
                    assert piece["index"] == len(calls) - 1
                    assert set(piece) == {"index", "function"}
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
            reasons.append(choice["finish_reason"])
    assert all(reason is None for reason in reasons[:-1])
    return message | ({"tool_calls": calls} if calls else {}), reasons[-1]


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {key: value for key, value in call.items() if key not in ("id", "index")}
        for call in message.get("tool_calls", ())
    ]
    return {key: message.get(key) or "" for key in ("content", "reasoning", "reasoning_content")} | {"calls": calls}


def _both(api: TestClient, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the message and the finish_reason, which are the same whole and streamed."""
    whole = api.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    streamed = api.post("/v1/chat/completions", json=body | {"stream": True})
    message, reason = joined(events(streamed.text))
    assert streamed.text.endswith("data: [DONE]\n\n")
    choice = whole.json()["choices"][0]
    assert _without_ids(choice["message"]) == _without_ids(message)
    assert choice["finish_reason"] == reason
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_reasoning_content_and_calls(parsed: TestClient, answers: Answers, size: int) -> None:
    answers(ANSWER, size=size)
    message, reason = _both(parsed, BODY)
    assert reason == "tool_calls"
    assert message["reasoning"] == message["reasoning_content"] == "Hmm."
    assert (message["role"], message["content"]) == ("assistant", "Let me see.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 29 and call_id.startswith("call_") for call_id in ids)


def test_arguments_are_streamed(parsed: TestClient, answers: Answers) -> None:
    answers(CALL)
    chunks = events(parsed.post("/v1/chat/completions", json=BODY | {"stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert sum("tool_calls" in delta for delta in deltas) > 2
    assert all("role" not in delta for delta in deltas[1:])


def test_an_answer_without_calls(parsed: TestClient, answers: Answers) -> None:
    answers("Hello. \n")
    message, reason = _both(parsed, BODY)
    assert (message["content"], reason) == ("Hello. \n", "stop")
    assert "tool_calls" not in message
    answers("")
    assert _both(parsed, BODY)[0]["content"] == ""
    answers(f"{CALL}")
    assert _both(parsed, BODY)[0]["content"] is None


def test_a_truncated_call_has_the_reason_length(parsed: TestClient, answers: Answers) -> None:
    answers(CALL[: CALL.index(": 1") + 1], finish_reason="length")
    message, reason = _both(parsed, BODY)
    assert reason == "length"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":'}


def test_without_tools_calls_are_text(parsed: TestClient, answers: Answers) -> None:
    answers(f"<think>Hmm.</think>{CALL}")
    for body in ({"messages": [USER], "max_tokens": 90}, BODY | {"tool_choice": "none"}):
        message, reason = _both(parsed, body)
        assert (message["content"], message["reasoning"], reason) == (CALL, "Hmm.", "stop")


def test_one_call_at_most(parsed: TestClient, answers: Answers) -> None:
    answers(ANSWER)
    assert len(_both(parsed, BODY | {"parallel_tool_calls": False})[0]["tool_calls"]) == 1


def test_reasoning_can_be_left_out(parsed: TestClient, answers: Answers) -> None:
    answers(ANSWER)
    message, _ = _both(parsed, BODY | {"include_reasoning": False})
    assert "reasoning" not in message
    assert message["content"] == "Let me see."


def test_forced_calls(parsed: TestClient, answers: Answers) -> None:
    answers('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]')
    message, reason = _both(parsed, BODY | {"tool_choice": "required"})
    assert ([call["function"]["name"] for call in message["tool_calls"]], reason) == (["f", "g"], "tool_calls")
    answers('{"a": [1, 2]}')
    message, reason = _both(parsed, CHAT | {"tools": SMALL["tools"], "tool_choice": NAMED})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": [1, 2]}'}
    assert (message["content"], reason) == (None, "tool_calls")


USAGE = {"include_usage": True, "continuous_usage_stats": True}


def test_several_choices_with_logprobs_ids_and_usage(
    parsed: TestClient, engines: FakeEngines, answers: Answers
) -> None:
    answers(ANSWER)
    script = [item for item in engines.scripts[0] if isinstance(item, EngineOutput)]
    engines.scripts = [[output(item.token_ids, item.finish_reason, logprobs=[-1.0]) for item in script]]
    extras = {"logprobs": True, "return_token_ids": True, "stream_options": USAGE}
    body = BODY | {"n": 2, "temperature": 1, "stream": True} | extras
    chunks = events(parsed.post("/v1/chat/completions", json=body).text)
    for index in (0, 1):
        message, reason = joined(chunks, index)
        assert (message["content"], reason) == ("Let me see.", "tool_calls")
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
        ids = [token for choice in own for token in choice["token_ids"]]
        assert ids == [token for item in script for token in item.token_ids]
        assert len([entry for choice in own for entry in choice["logprobs"]["content"]]) == len(ids)
    assert all("usage" in chunk for chunk in chunks)


def test_the_stream_has_no_empty_events(parsed: TestClient, answers: Answers) -> None:
    answers(CALL)
    body = BODY | {"stream": True}
    with parsed.stream("POST", "/v1/chat/completions", json=body) as answer:
        text = "".join(answer.iter_text())
    assert all(line.startswith(("data: ", ":")) for line in text.split("\n\n")[:-1])
    for chunk in events(text)[1:-1]:
        assert chunk["choices"][0]["delta"]


def test_names_in_the_configuration_win(open_client: OpenClient, parsed_path: Any, answers: Answers) -> None:
    api = open_client(model=str(parsed_path), tool_parser="none", reasoning_parser="none")
    answers("<think>Hmm.</think>Hi")
    assert api.post("/v1/chat/completions", json=BODY).status_code == 400
    body = {"messages": [USER], "max_tokens": 50}
    assert api.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "Hmm.Hi"
    mistral = open_client(model=str(parsed_path), tool_parser="mistral", reasoning_parser="none")
    answers('[TOOL_CALLS]f[ARGS]{"a": 1}')
    (call,) = _both(mistral, BODY)[0]["tool_calls"]
    assert (call["function"]["name"], len(call["id"])) == ("f", 9)


KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


def test_kimi_ids_are_those_that_the_model_writes(
    open_client: OpenClient, parsed_path: Any, answers: Answers, engines: FakeEngines, tokenizer: Tokenizer
) -> None:
    api = open_client(model=str(parsed_path), tool_parser="kimi_k2", reasoning_parser="none")
    answers(KIMI_SECTION.format(KIMI_CALL.format("functions.f:0") + KIMI_CALL.format("g")))
    for stream in (False, True):
        answer = api.post("/v1/chat/completions", json=BODY | {"stream": stream})
        message = joined(events(answer.text))[0] if stream else answer.json()["choices"][0]["message"]
        # The second call has a plain name, so it gets the id that the template expects.
        assert [call["id"] for call in message["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    calls = [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"}
    body = BODY | {"messages": [USER, {"role": "assistant", "tool_calls": calls}, result]}
    answers('{"a": 1}')
    forced = api.post("/v1/chat/completions", json=body | {"tool_choice": NAMED})
    (forced_call,) = forced.json()["choices"][0]["message"]["tool_calls"]
    assert forced_call["id"] == "functions.f:1"
    assert "functions.f:0<|im_end|>" in tokenizer.decode(
        engines.calls[-1][0].prompt_token_ids, skip_special_tokens=False
    )
    answers(KIMI_SECTION.format(KIMI_CALL.format("functions.f:7")))
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"model": "tiny", "max_tokens": 90, "messages": [USER], "tools": tools}
    assert api.post("/v1/messages", json=body).json()["content"][0]["id"] == "functions.f:7"
    body = {"input": "q", "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}]}
    assert api.post("/v1/responses", json=body).json()["output"][0]["call_id"] == "functions.f:7"


def test_a_kimi_id_of_an_earlier_call_is_replaced(open_client: OpenClient, parsed_path: Any, answers: Answers) -> None:
    api = open_client(model=str(parsed_path), tool_parser="kimi_k2", reasoning_parser="none")
    written = ("functions.f:0", "functions.f:1", "functions.g:0", "functions.g:0", "functions.f:9")
    answers(KIMI_SECTION.format("".join(map(KIMI_CALL.format, written))))
    expected = ["functions.f:1", "functions.f:2", "functions.g:0", "functions.g:4", "functions.f:9"]
    calls = [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"}
    body = BODY | {"messages": [USER, {"role": "assistant", "tool_calls": calls}, result]}
    assert [call["id"] for call in _both(api, body)[0]["tool_calls"]] == expected
    streamed, _ = joined(events(api.post("/v1/chat/completions", json=body | {"stream": True}).text))
    assert [call["id"] for call in streamed["tool_calls"]] == expected
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    use = {"type": "tool_use", "id": "functions.f:0", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "functions.f:0", "content": "1"}
    messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
    body = {"model": "tiny", "max_tokens": 90, "messages": messages, "tools": tools}
    assert [block["id"] for block in api.post("/v1/messages", json=body).json()["content"]] == expected

    call = {"type": "function_call", "call_id": "functions.f:0", "name": "f", "arguments": "{}"}
    items = [USER, call, {"type": "function_call_output", "call_id": "functions.f:0", "output": "1"}]
    body = {"input": items, "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}]}
    assert [item["call_id"] for item in api.post("/v1/responses", json=body).json()["output"]] == expected


@pytest.mark.parametrize("lost_after", range(1, 18))
async def test_another_engine_continues_a_stream_in_a_call(tokenizer: Tokenizer, lost_after: int) -> None:
    text = f"Now: {CALL} ok"
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = [output([token]) for token in ids[:lost_after]]
    rest = output(ids[lost_after:], "stop", replica="r2")
    engines = FakeEngines([[*first, EngineDeadError("gone")], [rest]])
    params = SamplingParams(max_tokens=200)
    stream = TextStream(tokenizer, [5], params, tokenizer.special_token_ids(MARKERS))
    generation = Generation(engines, EngineRequest("id", [5], params), Prompt(EngineRequest("", [5]), [7]), stream)
    pieces = [delta.text async for delta in generation.deltas()]
    assert generation.num_migrations == 1
    assert "".join(pieces) == text
    assert parse(parser("hermes"), *pieces) == parse(parser("hermes"), text)
    assert call("f", '{"a": 1}')[0] in parse(parser("hermes"), *pieces)


def test_special_tokens_that_are_no_markers_stay_hidden(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<tool_call>b<|im_end|>c", add_special_tokens=False)
    shown = tokenizer.special_token_ids([*MARKERS, "unknown"])
    for stop in (None, "zz"):
        stream = TextStream(tokenizer, [5], SamplingParams(stop=stop), shown)
        assert "".join(stream.push([token]) for token in ids) + stream.push([2], final=True) == "a<tool_call>bc"
        assert stream.num_tokens == len(ids) + 1
    assert json.dumps(TextStream(tokenizer, [5], SamplingParams()).push(ids, final=True)) == '"abc"'
