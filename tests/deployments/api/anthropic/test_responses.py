"""Messages, whole and streamed: both say the same, in the types of Anthropic's client."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.errors import EngineDeadError
from tests.deployments.api.anthropic.sdk import added_up, checked_error, checked_events, checked_message, without_ids
from tests.deployments.api.conftest import Answers
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, output

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f'<think>\nHmm.\n</think>\n\nLet me see.\n{CALL}\n<tool_call>{{"name": "g"}}</tool_call>'
USER = {"role": "user", "content": "hi"}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
PLAIN: dict[str, Any] = {"model": "tiny", "max_tokens": 70, "messages": [USER]}
BODY: dict[str, Any] = PLAIN | {"max_tokens": 40, "tools": TOOLS, "thinking": {"type": "adaptive"}}


def both(api: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message, which is the same whole and streamed."""
    whole = api.post("/v1/messages", json=body)
    assert whole.status_code == 200, whole.text
    message = checked_message(whole.json())
    streamed = api.post("/v1/messages", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert without_ids(added_up(checked_events(streamed.text))) == without_ids(message)
    return message


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_thinking_text_and_calls(parsed: TestClient, answers: Answers, size: int) -> None:
    answers(ANSWER, size=size)
    message = both(parsed, BODY)
    thinking, text, first, second = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hmm.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "f", {"a": 1})
    assert (second["type"], second["name"], second["input"]) == ("tool_use", "g", {})
    assert first["id"] != second["id"]
    assert all(block["id"].startswith("toolu_") for block in (first, second))
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["id"][:4], message["model"], message["role"]) == ("msg_", "tiny", "assistant")


def test_text_after_a_call_is_a_block_of_its_own(parsed: TestClient, answers: Answers) -> None:
    answers(f"One.\n{CALL}\n\nTwo.\n{CALL}")
    content = both(parsed, BODY)["content"]
    assert [block["type"] for block in content] == ["text", "tool_use", "text", "tool_use"]
    assert [block["text"] for block in content[::2]] == ["One.", "Two."]


def test_arguments_are_streamed(parsed: TestClient, answers: Answers) -> None:
    answers(CALL)
    events = checked_events(parsed.post("/v1/messages", json=BODY | {"stream": True}).text)
    deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == '{"a": 1}'
    assert len(deltas) > 2


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_that_is_not_wanted_is_left_out(parsed: TestClient, answers: Answers, thinking: Any) -> None:
    answers(f"<think>Hmm.</think>Hi. {CALL}")
    content = both(parsed, BODY | {"thinking": thinking})["content"]
    assert [block["type"] for block in content] == ["text", "tool_use"]


def test_a_model_without_a_format(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], cached=3), output([71, 72], "stop", cached=3)]]
    message = both(client, PLAIN)
    (block,) = message["content"]
    assert block["type"] == "text"
    assert message["stop_reason"] == "end_turn"
    prompt = len(engines.calls[0][0].prompt_token_ids)
    assert message["usage"] == {
        "input_tokens": prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 3,
    }


def test_the_start_of_a_stream_has_the_cached_tokens(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], cached=3), output([71, 72], "stop", cached=3)]]
    events = checked_events(client.post("/v1/messages", json=PLAIN | {"stream": True}).text)
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert (start["cache_read_input_tokens"], start["output_tokens"]) == (3, 1)
    assert end == start | {"output_tokens": 3}


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_answer(parsed: TestClient, answers: Answers, text: str) -> None:
    answers(text)
    assert both(parsed, BODY)["content"] == ([{"type": "text", "text": text}] if text else [])


def test_why_an_answer_ends(parsed: TestClient, answers: Answers) -> None:
    answers("Hi, you.", finish_reason="length")
    assert both(parsed, PLAIN)["stop_reason"] == "max_tokens"
    assert both(parsed, PLAIN | {"max_tokens": 9000})["stop_reason"] == "model_context_window_exceeded"
    answers("Hi, you.")
    assert both(parsed, PLAIN)["stop_reason"] == "end_turn"
    message = both(parsed, PLAIN | {"stop_sequences": [", y"]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ", y")
    assert message["content"] == [{"type": "text", "text": "Hi"}]


def test_a_truncated_call_has_the_arguments_that_are_complete(parsed: TestClient, answers: Answers) -> None:
    answers('<tool_call>{"name": "f", "arguments": {"a": 1, "b": [2, "x', finish_reason="length")
    message = both(parsed, BODY | {"max_tokens": 5})
    assert message["content"][0]["input"] == {"a": 1, "b": [2]}
    assert message["stop_reason"] == "max_tokens"


def test_forced_calls(parsed: TestClient, answers: Answers) -> None:
    answers('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]')
    message = both(parsed, BODY | {"tool_choice": {"type": "any"}})
    assert [(block["name"], block["input"]) for block in message["content"]] == [("f", {"a": 1}), ("g", {})]
    answers('{"a": [1, 2]}')
    message = both(parsed, BODY | {"tool_choice": {"type": "tool", "name": "f"}})
    assert [block["input"] for block in message["content"]] == [{"a": [1, 2]}]
    assert message["stop_reason"] == "tool_use"


def test_one_call_at_most(parsed: TestClient, answers: Answers) -> None:
    answers(ANSWER)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content = both(parsed, BODY | {"tool_choice": choice})["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]


def test_ids_of_calls_fit_the_template(open_client: OpenClient, parsed_path: Any, answers: Answers) -> None:
    mistral = open_client(model=str(parsed_path), tool_parser="mistral", reasoning_parser="none")
    answers('[TOOL_CALLS]f[ARGS]{"a": 1}')
    (call,) = both(mistral, BODY)["content"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_no_tokens_only_compute_the_prompt(parsed: TestClient, answers: Answers, engines: FakeEngines) -> None:
    answers("Hi")
    message = both(parsed, PLAIN | {"max_tokens": 0})
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    assert engines.calls[0][0].params.max_tokens == 1


def test_an_error_in_a_stream_is_its_last_event(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70]), EngineDeadError("gone")]]
    answer = client.post("/v1/messages", json=PLAIN | {"stream": True})
    events = checked_events(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-2:] == ["content_block_delta", "error"]
    error = checked_error(events[-1])
    assert error["type"] == "overloaded_error"
    assert events[-1]["request_id"] == answer.headers["request-id"]


def test_counted_tokens_are_those_of_the_usage(parsed: TestClient, answers: Answers, engines: FakeEngines) -> None:
    answers("Hi")
    for body in (PLAIN, BODY, PLAIN | {"system": "Be kind."}):
        usage = parsed.post("/v1/messages", json=body).json()["usage"]
        counted = parsed.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": usage["input_tokens"]}
        without_limit = {name: value for name, value in body.items() if name != "max_tokens"}
        assert parsed.post("/v1/messages/count_tokens", json=without_limit).json() == counted.json()
    assert len(engines.calls) == 3
    long = PLAIN | {"messages": [{"role": "user", "content": "a " * 999}]}
    assert parsed.post("/v1/messages/count_tokens", json=long).json()["input_tokens"] > 999
