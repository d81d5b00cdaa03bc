"""logprob_token_ids and return_tokens_as_token_ids, as requests to an engine and in responses."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.outputs import EngineOutput, FinishReason, Logprob
from tests.deployments.fakes import FakeEngines, events

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}], "logprobs": True}
COMPLETION: dict[str, Any] = {"prompt": "the cache", "logprobs": 3}


@pytest.fixture
def listing(engines: FakeEngines) -> FakeEngines:
    """Engines that return the log-probabilities of token 70, which they sample, and of 5 and 80."""
    position = {70: Logprob(-0.5, 1), 5: Logprob(-9.0, 40), 80: Logprob(-2.0, 3)}
    engines.scripts = [[EngineOutput("id", 0, [70], FinishReason.STOP, logprobs=[position], replica="r1")]]
    return engines


@pytest.mark.parametrize("stream", [False, True])
def test_chat_lists_the_tokens(client: TestClient, listing: FakeEngines, stream: bool) -> None:
    body = CHAT | {"logprob_token_ids": [5, 80], "return_tokens_as_token_ids": True, "stream": stream}
    answer = client.post("/v1/chat/completions", json=body)
    choice = (events(answer.text)[0] if stream else answer.json())["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert entry["token"] == "token_id:70"
    tops = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
    assert tops == {"token_id:70": -0.5, "token_id:80": -2.0, "token_id:5": -9.0}
    params = listing.calls[0][0].params
    assert (params.logprobs, params.logprob_token_ids) == (0, (5, 80))


@pytest.mark.parametrize("stream", [False, True])
def test_completions_list_the_tokens(client: TestClient, listing: FakeEngines, stream: bool) -> None:
    body = COMPLETION | {"logprob_token_ids": [5, 80], "return_tokens_as_token_ids": True, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    logprobs = (events(answer.text)[0] if stream else answer.json())["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:70"]
    assert logprobs["top_logprobs"] == [{"token_id:70": -0.5, "token_id:80": -2.0, "token_id:5": -9.0}]
    named = client.post("/v1/completions", json=COMPLETION | {"logprob_token_ids": [5, 80]}).json()
    assert not named["choices"][0]["logprobs"]["tokens"][0].startswith("token_id")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a", "logprob_token_ids": [5]}),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": []}),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [384]}),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": ["5"]}),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": list(range(129))}),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [5], "use_beam_search": True}),
        ("chat/completions", {"messages": CHAT["messages"], "logprob_token_ids": [5]}),
    ],
    ids=str,
)
def test_what_is_refused(client: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    wanted = "logprobs" if "use_beam_search" in body else "logprob_token_ids"
    assert answer.json()["error"]["param"] == wanted
