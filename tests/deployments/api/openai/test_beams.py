"""Beam search over HTTP: one request to an engine, whose answers are the choices."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient

from engine.outputs import EngineOutput
from tests.deployments.fakes import FakeEngines, output

SEARCH: dict[str, Any] = {"prompt": "the cache", "use_beam_search": True, "n": 3, "return_token_ids": True}


def _beams(*answers: list[int]) -> list[EngineOutput]:
    """Return the outputs of a search, which come together."""
    last = len(answers) - 1
    return [
        replace(output(ids, "stop" if ids[-1] == 2 else "length", cached=3), index=index, is_last=index == last)
        for index, ids in enumerate(answers)
    ]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_choices_are_the_beams(client: TestClient, engines: FakeEngines, path: str) -> None:
    engines.scripts = [[*_beams([70, 2], [71, 72, 73], [74, 75, 2])]]
    body = SEARCH | {"length_penalty": 0.5, "max_tokens": 3}
    if path != "completions":
        body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]}
    answer = client.post(f"/v1/{path}", json=body).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70, 2], [71, 72, 73], [74, 75, 2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "stop"]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    (call,) = engines.calls
    params = call[0].params
    assert (params.n, params.beam_width, params.length_penalty, params.max_tokens) == (3, 3, 0.5, 3)
    assert params.temperature == 0  # although the checkpoint's own default is another one


def test_each_prompt_has_a_search_of_its_own(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[*_beams([70], [71])], [*_beams([72], [73])]]
    answer = client.post("/v1/completions", json=SEARCH | {"prompt": ["a", "b"], "n": 2}).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70], [71], [72], [73]]
    assert len(engines.calls) == 2


def test_a_lost_search_starts_again(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[ActorDiedError()], [*_beams([70, 2], [71, 2], [72, 2])]]
    answer = client.post("/v1/completions", json=SEARCH).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70, 2], [71, 2], [72, 2]]
    first, second = (call[0] for call in engines.calls)
    assert second.output_token_ids == []
    assert second.params == first.params


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 4}, "best_of"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"echo": True, "max_tokens": 0}, "use_beam_search"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"n": 17}, "n"),
        ({"use_beam_search": False, "length_penalty": 2.0, "n": 1}, "length_penalty"),
    ],
    ids=str,
)
def test_what_a_search_excludes(client: TestClient, engines: FakeEngines, changed: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json=SEARCH | changed)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "beam_width" not in answer.text  # which no request has
    assert not engines.calls


def test_neutral_values_are_no_obstacle(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[*_beams([70], [71], [72])]]
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "stop": [], "logit_bias": {}, "length_penalty": 1}
    assert client.post("/v1/completions", json=SEARCH | neutral).status_code == 200
