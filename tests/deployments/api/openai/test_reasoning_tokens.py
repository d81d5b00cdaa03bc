"""``completion_tokens_details.reasoning_tokens`` of chat: whole and streamed, in every kind of answer."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.text.tokenizer import Tokenizer
from tests.deployments.api.conftest import Answers
from tests.deployments.api.openai.test_tool_requests import USER
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeEngines, events

BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 90}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CONTINUED = {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": "<think>It"}]}
SIZES = [1, 2, 5, 1000]


def reasoning_tokens(api: TestClient, **body: Any) -> int:
    """Return the number in the usage, which is the same whole and streamed."""
    whole = api.post("/v1/chat/completions", json=BODY | body)
    assert whole.status_code == 200, whole.text
    streamed = BODY | body | {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = events(api.post("/v1/chat/completions", json=streamed).text)
    usage: dict[str, Any] = whole.json()["usage"]
    assert last["usage"] == usage
    number: int = usage["completion_tokens_details"]["reasoning_tokens"]
    assert number <= usage["completion_tokens"]
    return number


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("reasoning", "rest", "body"),
    [
        ("<think>Hmm, well.</think>", "\n\nHello.", {}),
        ("<think>Hmm, well.</think>", "\n\nHello.", {"include_reasoning": False}),
        ("<think>\n\n</think>", "\n\nHello.", {}),
        ("<think>Hmm.</think>", "", {}),
        ("<think>Hmm.</think>", f"Let me see.\n{CALL}", {"tools": TOOLS}),
        ("<think>Hmm.</think>", CALL, {"tools": TOOLS, "parallel_tool_calls": False}),
        ("<think>Hm</think>", "Hello.", {"thinking_token_budget": 1}),
        (" is.</think>", "Yes.", CONTINUED),
        ("", "Hello. What is </think>?", {}),
        ("", CALL, {"tools": TOOLS}),
        ("", '[{"name": "f", "parameters": {}}]', {"tools": TOOLS, "tool_choice": "required"}),
        ("", " a cache.", {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": "A"}]}),
    ],
)
def test_the_tokens_up_to_the_end_of_reasoning_are_counted(
    parsed: TestClient,
    answers: Answers,
    tokenizer: Tokenizer,
    reasoning: str,
    rest: str,
    body: dict[str, Any],
    size: int,
) -> None:
    answers(reasoning + rest, size=size)
    assert reasoning_tokens(parsed, **body) == count(tokenizer, reasoning)


@pytest.mark.parametrize("size", SIZES)
def test_reasoning_that_has_not_ended_is_the_whole_answer(
    parsed: TestClient, answers: Answers, tokenizer: Tokenizer, size: int
) -> None:
    text = "<think>Hmm. Let me see"
    answers(text, size=size, finish_reason="length")
    assert reasoning_tokens(parsed) == count(tokenizer, text) + 1  # the script's last token has no text


def test_the_answers_of_one_request_are_added_up(
    parsed: TestClient, engines: FakeEngines, answers: Answers, tokenizer: Tokenizer
) -> None:
    texts = ["<think>Hmm.</think>Hello.", "Hello.", "<think>No</think>Yes"]
    scripts = []
    for text in texts:
        answers(text)
        scripts += engines.scripts
    engines.scripts = scripts * 2  # the whole response, and the stream
    expected = count(tokenizer, "<think>Hmm.</think>") + count(tokenizer, "<think>No</think>")
    assert reasoning_tokens(parsed, n=3, temperature=1) == expected


def test_continuous_usage_counts_up(parsed: TestClient, answers: Answers, tokenizer: Tokenizer) -> None:
    answers("<think>Hmm.</think>Hello.")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(parsed.post("/v1/chat/completions", json=BODY | {"stream": True, "stream_options": options}).text)
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    last = count(tokenizer, "<think>Hmm.</think>")
    assert counts == [*range(1, last), *[last] * (len(counts) - last + 1)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_format_without_a_single_end_of_reasoning(
    open_client: OpenClient, parsed_path: Any, answers: Answers, tokenizer: Tokenizer, size: int
) -> None:
    """Its tokens count piece by piece."""
    api = open_client(model=str(parsed_path), tool_parser="openai", reasoning_parser="openai_gptoss")
    reasoning = "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>final<|message|>"
    answers(f"{reasoning}Hello.", size=size)
    assert abs(reasoning_tokens(api) - count(tokenizer, reasoning)) < size
    answers("<|channel|>final<|message|>Hello.", size=size)
    assert reasoning_tokens(api) == 0


def test_a_model_without_reasoning_counts_none(client: TestClient) -> None:
    assert reasoning_tokens(client) == 0
    completion = client.post("/v1/completions", json={"prompt": "a"}).json()
    assert "completion_tokens_details" not in completion["usage"]
