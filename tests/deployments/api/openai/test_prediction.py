"""OpenAI's ``prediction``: the engine drafts from it, the answer stays the same, and the usage counts its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.llm import LLM
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import events
from tests.deployments.real_engines import RealEngines

DEMO_MODEL = Path(__file__).parents[4] / "demo" / "model"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "What does the router do?"}], "max_tokens": 40}


@pytest.fixture(scope="module")
def llm() -> LLM:
    speculation = {"method": "ngram", "num_speculative_tokens": 8}
    sizes: dict[str, Any] = {"kv_cache_memory": "16MiB", "max_model_len": 300}
    return LLM(str(DEMO_MODEL), dtype="float32", max_decode_slowdown=None, speculative_config=speculation, **sizes)


@pytest.fixture
def engines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> RealEngines:
    """The engine of ``llm``."""
    engines = RealEngines(llm.engine)
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: engines)
    return engines


@pytest.fixture
def client(open_client: OpenClient) -> TestClient:
    return open_client(model=str(DEMO_MODEL), model_name=None)


def chat(client: TestClient, **body: Any) -> tuple[str, dict[str, int]]:
    """Return the text of an answer and the details of its usage, which are the same whole and streamed."""
    answer = client.post("/v1/chat/completions", json=BODY | body)
    assert answer.status_code == 200, answer.text
    streamed = BODY | body | {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = events(client.post("/v1/chat/completions", json=streamed).text)
    details = answer.json()["usage"]["completion_tokens_details"]
    assert last["usage"]["completion_tokens_details"] == details
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text, details


def content(text: str | list[str]) -> dict[str, Any]:
    parts = text if isinstance(text, str) else [{"type": "text", "text": part} for part in text]
    return {"prediction": {"type": "content", "content": parts}}


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 7, "presence_penalty": 0.5}])
def test_a_prediction_changes_no_answer_and_its_tokens_are_counted(client: TestClient, params: dict[str, Any]) -> None:
    text, details = chat(client, **params)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    half = len(text) // 2
    for predicted in (text, [text[:half], text[half:]]):
        same, details = chat(client, **params, **content(predicted))
        assert same == text
        assert details["accepted_prediction_tokens"] > 20
        assert details["rejected_prediction_tokens"] == 0
    edited, details = chat(client, **params, **content(f"{text[:half]} something else {text[half:]}"))
    assert edited == text
    assert details["accepted_prediction_tokens"] > 10
    assert details["rejected_prediction_tokens"] > 0
    same, details = chat(client, **params, **content("9 8 7 6 5 4 3 2 1 0 9 8 7 6 5 4 3 2 1 0"))
    assert (same, details["accepted_prediction_tokens"]) == (text, 0)


def test_the_tokens_of_several_answers_are_added(client: TestClient) -> None:
    _, details = chat(client, temperature=0.8, seed=7, n=2, **content("the the the the the"))
    assert details["rejected_prediction_tokens"] >= 8


def test_the_tokens_of_a_prediction_travel_with_the_request(client: TestClient, engines: RealEngines) -> None:
    client.post("/v1/chat/completions", json=BODY | content("the cache"))
    assert len(engines.calls[-1][0].prediction_token_ids) > 1
    client.post("/v1/chat/completions", json=BODY | content(""))
    assert engines.calls[-1][0].prediction_token_ids == []


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"type": "content"},
        {"type": "other", "content": "a"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
        {"type": "content", "content": "cache " * 100_000},
    ],
)
def test_an_invalid_prediction_is_rejected_by_name(client: TestClient, prediction: Any) -> None:
    answer = client.post("/v1/chat/completions", json=BODY | {"prediction": prediction})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("prediction")
