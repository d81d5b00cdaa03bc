"""10,000 malformed bodies to every endpoint that reads one: no 5xx but 501 and 503, and the server is as before.

A body is a valid one with values replaced, removed, duplicated or nested, or JSON with bytes changed.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.ingress import Ingress
from tests.deployments.answering_engines import AnsweringEngines
from tests.deployments.conftest import OpenClient

MESSAGES: list[Any] = [
    {"role": "user", "content": "the cache"},
    {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT: dict[str, Any] = {
    "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 0.5, "stop": ["x"], "n": 2,
    "logit_bias": {"5": 1}, "stream": False, "max_tokens": 3, "chat_template_kwargs": {"a": 1}, "top_logprobs": 1,
    "logprobs": True, "truncate_prompt_tokens": 9, "continue_final_message": True, "logprob_token_ids": [5],
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "prompt": ["a", [5, 6]], "temperature": 0.5, "echo": True, "logprobs": 1, "best_of": 2, "seed": 3, "stop": "x",
    "structured_outputs": {"regex": "a+"}, "stream_options": {"include_usage": True}, "cache_salt": "s", "stream": True,
    "prompt_logprobs": 1, "use_beam_search": True, "length_penalty": 2.0, "allowed_token_ids": [5],
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "instructions": "b",
    "max_output_tokens": 20, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "store": True,
    "tools": [{"type": "function", "name": "f", "parameters": {}}], "metadata": {"a": "b"},
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "system": [{"type": "text", "text": "b"}], "stop_sequences": ["x"], "thinking": {"type": "disabled"},
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "top_k": 3,
}  # fmt: skip
EMBEDDING: dict[str, Any] = {
    "input": ["a", "the cache"], "model": "tiny", "encoding_format": "float", "dimensions": 2, "user": "u",
    "truncate_prompt_tokens": 5, "truncation_side": "left", "normalize": True, "priority": 1, "prompt_name": "query",
}  # fmt: skip
SCORE: dict[str, Any] = {"text_1": "a", "text_2": ["b", "the cache"], "model": "tiny", "truncate_prompt_tokens": -1}
RERANK: dict[str, Any] = {
    "query": "a", "documents": ["b", {"text": "the cache"}], "top_n": 1, "return_documents": True, "model": "tiny",
}  # fmt: skip
BATCH: dict[str, Any] = {
    "input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/batches": [BATCH],
    "/v1/files": [{"purpose": "batch", "file": "a"}],  # which is no form
    "/v1/chat/completions": [CHAT],
    "/v1/completions": [COMPLETION],
    "/v1/responses": [RESPONSE],
    "/v1/responses/input_tokens": [RESPONSE],
    "/v1/messages": [MESSAGE],
    "/v1/messages/count_tokens": [MESSAGE],
    "/invocations": [CHAT, COMPLETION],
    "/tokenize": [CHAT, {"prompt": "the cache", "add_special_tokens": True, "return_token_strs": True}],
    "/v1/embeddings": [EMBEDDING, {"input": [[5, 6], [7]], "encoding_format": "base64"}],
    "/pooling": [EMBEDDING],
    "/score": [SCORE],
    "/v1/score": [SCORE, {"queries": "a", "documents": ["b", "c"]}],
    "/rerank": [RERANK],
    "/v1/rerank": [RERANK],
    "/v2/rerank": [RERANK],
    "/classify": [{"input": ["a", "b"], "model": "tiny"}],
    "/detokenize": [{"tokens": [5, 6, 7], "model": "tiny"}],
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.0, -0.5, 1e308, "", "a", "\ud800", "\x00", "é" * 50,
    [], [[]], [None], {}, {"": None}, {"type": None}, [0] * 200, ["a"] * 200, {"a": {"b": {"c": []}}}, "token_id:5",
]  # fmt: skip
NUM_BODIES, NUM_POOLED = 4_000, 1_000


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value inside ``value``."""
    places: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        places += [(value, key), *_places(inner)]
    return places


def _malformed(rng: random.Random, valid: dict[str, Any]) -> bytes:
    body = copy.deepcopy(valid)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = rng.choice(_places(body) or [(body, "x")])
        change = rng.randrange(4)
        if change == 0 and key in (container if isinstance(container, dict) else range(len(container))):
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[rng.choice(["", "type", "\ud800", "guided_regex", "a" * 300])] = rng.choice(VALUES)
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    encoded = json.dumps(body).encode()
    if rng.random() < 0.1:
        position = rng.randrange(len(encoded))
        encoded = encoded[:position] + bytes([rng.randrange(256)]) + encoded[position + rng.randrange(3) :]
    return encoded


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> AnsweringEngines:
    """Engines that answer every valid request."""
    engines = AnsweringEngines()
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: engines)
    return engines


POOLED = [path for path in BODIES if not path.startswith(("/v1/c", "/v1/m", "/v1/resp", "/inv", "/tok", "/detok"))]


@pytest.mark.long
@pytest.mark.parametrize("task", ["embed", "score"])
def test_malformed_bodies_harm_no_server_of_another_task(
    task: str, open_pooled: OpenClient, engines: AnsweringEngines
) -> None:
    client = open_pooled(task)
    rng, statuses = random.Random(2), Counter[int]()
    for number in range(NUM_POOLED):
        path = POOLED[number % len(POOLED)]
        content = _malformed(rng, rng.choice(BODIES[path]))
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        statuses[answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code in (501, 503), (path, content, answer.text)
        if answer.status_code >= 400:
            assert "error" in answer.json(), (path, content)
    assert {200, 400} <= set(statuses), statuses
    assert all(dispatch.ended is not None for dispatch in engines.dispatches)
    assert client.get("/health").status_code == 200


@pytest.mark.long
def test_malformed_bodies_harm_nothing(client: TestClient, ingress: Ingress, engines: AnsweringEngines) -> None:
    described = client.get("/openapi.json").json()["paths"]
    assert set(BODIES) == {
        path for path, operations in described.items() if "requestBody" in operations.get("post", {})
    }
    rng, statuses = random.Random(1), Counter[int]()
    for number in range(NUM_BODIES):
        path = list(BODIES)[number % len(BODIES)]
        content = _malformed(rng, rng.choice(BODIES[path]))
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        statuses[answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code in (501, 503), (path, content, answer.text)
        if answer.status_code >= 400:
            assert "error" in answer.json(), (path, content)
    assert {200, 400} <= set(statuses), statuses
    assert statuses[400] > NUM_BODIES / 4, statuses
    assert not ingress._unfinished
    assert all(dispatch.ended is not None for dispatch in engines.dispatches)
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
