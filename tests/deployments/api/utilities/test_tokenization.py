"""/tokenize and /detokenize: the tokens are those that a request for generation would send to an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api.prompts import MAX_CONTEXTS
from deployments.api.utilities.openapi import DetokenizeResponse, TokenizeResponse
from engine.text.tokenizer import Tokenizer
from tests.deployments.fakes import INFO, FakeEngines

MESSAGES = [{"role": "user", "content": "the cache"}, {"role": "assistant", "content": "holds the"}]


def _tokens(client: TestClient, **body: Any) -> list[int]:
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    parsed = TokenizeResponse.model_validate(answer.json(), strict=True)
    assert parsed.count == len(parsed.tokens)
    assert parsed.max_model_len == INFO.max_model_len
    return parsed.tokens


def test_a_text_has_the_tokens_of_a_completion(client: TestClient, engines: FakeEngines) -> None:
    for text in ("the cache holds", "x", "€ 5"):
        client.post("/v1/completions", json={"prompt": text})
        assert _tokens(client, prompt=text, model="tiny") == engines.calls[-1][0].prompt_token_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_special_tokens": True},
    ],
    ids=str,
)
def test_a_conversation_has_the_tokens_of_a_chat(
    client: TestClient, engines: FakeEngines, options: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES} | options
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert _tokens(client, **body) == engines.calls[-1][0].prompt_token_ids


def test_the_vocabulary_spells_the_tokens(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "the cache", "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == "theĠcache"  # a space, as byte-level BPE writes it
    assert client.post("/tokenize", json={"prompt": "the cache"}).json()["token_strs"] is None


def test_tokens_become_the_same_text(client: TestClient) -> None:
    for text in ("the cache holds", "a€b", ""):
        answer = client.post("/detokenize", json={"tokens": _tokens(client, prompt=text), "model": "tiny"})
        assert DetokenizeResponse.model_validate(answer.json(), strict=True).prompt == text
    assert client.post("/detokenize", json={"tokens": [3, 2]}).json() == {"prompt": "<|im_start|></s>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [384]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
    ids=str,
)
def test_what_is_refused(client: TestClient, path: str, body: Any, status: int, param: str) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_text_may_be_longer_than_the_context_within_a_bound(client: TestClient, tokenizer_path: Any) -> None:
    assert len(_tokens(client, prompt="the cache " * 200)) > INFO.max_model_len
    longest = Tokenizer(tokenizer_path).longest_token
    too_long = "a" * (longest * (INFO.max_model_len * MAX_CONTEXTS + 1))
    assert len(too_long) < 2**15  # else the body is too long
    assert client.post("/tokenize", json={"prompt": too_long}).status_code == 400
