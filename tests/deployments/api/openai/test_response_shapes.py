"""Every response of chat and completions fits its type in the OpenAPI document, and strictly that of the openai client.

The document's types forbid unknown fields; the client's types are the API's, where unknown fields are vLLM's.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter
from starlette.testclient import TestClient

from deployments.api.openai.response_models import (
    ChatChunk,
    ChatResponse,
    CompletionChunk,
    CompletionResponse,
    ModelCard,
    ModelList,
)
from engine.outputs import EngineOutput, FinishReason, Logprob
from tests.deployments.api.conftest import Answers
from tests.deployments.fakes import FakeEngines, events

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ANSWER = '<think>why</think>so<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True},
    {"return_token_ids": False},
    {"n": 2, "temperature": 1.0},
    {"max_tokens": 5, "stop": ["zz"], "seed": 3, "user": "me", "cache_salt": "s"},
]


def _check(kind: type[BaseModel], theirs: Any, body: Any) -> None:
    kind.model_validate(body, strict=True)
    if kind is CompletionChunk:  # theirs is the type of a whole completion, in which every choice has ended
        choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in body["choices"]]
        body = body | {"choices": choices}
    assert TypeAdapter(theirs).validate_python(body, strict=True).model_dump(exclude_unset=True) == body


@pytest.fixture
def with_logprobs(engines: FakeEngines) -> FakeEngines:
    """Engines whose answers have log-probabilities, of the prompt too."""
    tops = {70: Logprob(-0.5, 1), 71: Logprob(-1.0, 2)}
    prompt = [None, {5: Logprob(-1.0, 1)}]
    first = EngineOutput("id", 0, [70], None, logprobs=[tops], prompt_logprobs=prompt, replica="r1")  # type: ignore[arg-type]
    last = EngineOutput("id", 0, [71], FinishReason.LENGTH, logprobs=[{71: Logprob(-0.1, 1)}], replica="r1")
    engines.scripts = [[first, last]]
    return engines


def _answers(client: TestClient, path: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.post(f"/v1/{path}", json=body | options)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if stream else [answer.json()]


@pytest.mark.parametrize(("options", "stream"), list(product(OPTIONS, [False, True])), ids=str)
def test_chat_and_completions(client: TestClient, options: dict[str, Any], stream: bool) -> None:
    for body in _answers(client, "chat/completions", CHAT | options, stream):
        _check(ChatChunk if stream else ChatResponse, ChatCompletionChunk if stream else ChatCompletion, body)
    echo = {"echo": True} if not stream else {}
    for body in _answers(client, "completions", {"prompt": ["a", "b"]} | options | echo, stream):
        _check(CompletionChunk if stream else CompletionResponse, Completion, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("listed", [{}, {"logprob_token_ids": [71]}, {"return_tokens_as_token_ids": True}], ids=str)
def test_with_log_probabilities(
    client: TestClient, with_logprobs: FakeEngines, stream: bool, listed: dict[str, Any]
) -> None:
    of_prompt = {} if stream else {"prompt_logprobs": 1}
    chat = CHAT | {"logprobs": True, "top_logprobs": 1} | listed | of_prompt
    for body in _answers(client, "chat/completions", chat, stream):
        _check(ChatChunk if stream else ChatResponse, ChatCompletionChunk if stream else ChatCompletion, body)
    for body in _answers(client, "completions", {"prompt": [5, 5], "logprobs": 1} | listed | of_prompt, stream):
        _check(CompletionChunk if stream else CompletionResponse, Completion, body)


@pytest.mark.parametrize("stream", [False, True])
def test_with_reasoning_and_calls(parsed: TestClient, answers: Answers, stream: bool) -> None:
    answers(ANSWER)
    bodies = _answers(parsed, "chat/completions", CHAT | {"tools": TOOLS}, stream)
    for body in bodies:
        _check(ChatChunk if stream else ChatResponse, ChatCompletionChunk if stream else ChatCompletion, body)
    reasons = [choice["finish_reason"] for body in bodies for choice in body["choices"]]
    assert reasons[-1] == "tool_calls"


def test_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    ModelList.model_validate(listed, strict=True)
    for card in listed["data"]:
        _check(ModelCard, Model, card)
        assert client.get(f"/v1/models/{card['id']}").json() == card
