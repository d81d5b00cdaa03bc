"""Several answers to a prompt: their order, the best of them, and what they cost."""

from __future__ import annotations

from typing import Any

from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient

from tests.deployments.fakes import FakeEngines, events, output

BODY: dict[str, Any] = {"prompt": [[20, 21], [30, 31]], "n": 2, "return_token_ids": True}


def test_choices_are_in_the_order_of_the_prompts(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70 + i], "stop", cached=i)] for i in range(4)]
    answer = client.post("/v1/completions", json=BODY).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70], [71], [72], [73]]
    assert [choice["prompt_token_ids"][0] for choice in answer["choices"]] == [20, 20, 30, 30]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},  # of each prompt's first answer
    }
    assert [call[1]["block_hashes"] for call in engines.calls] == [[]] * 4  # shorter than a block


def test_each_streamed_choice_begins_and_ends_once(client: TestClient, engines: FakeEngines) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream": True}
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}).text)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own] == ["assistant", None]
        assert [choice["finish_reason"] for choice in own] == [None, "stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert chunks[-1]["usage"]["prompt_tokens"] == len(engines.calls[0][0].prompt_token_ids)


def test_the_most_likely_answers_of_best_of_are_returned(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [
        [output([70, 71], "stop", logprobs=[-1.0, -3.0])],  # -2 a token
        [output([72], "stop", logprobs=[-1.5])],
        [output([], "abort")],
        [output([73, 74, 75], "stop", logprobs=[-1.0, -1.0, -1.0])],
    ]
    body = {"prompt": [20, 21], "n": 2, "best_of": 4, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[73, 74, 75], [72]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]  # they were for the ranking
    assert answer["usage"]["completion_tokens"] == 6  # what was generated, not what is shown
    assert answer["usage"]["prompt_tokens"] == 2
    assert {request.params.logprobs for request, _ in engines.calls} == {0}


def test_one_of_several_answers_migrates_alone(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [
        [output([70], logprobs=[-1.0]), ActorDiedError()],
        [output([71, 72], "stop", logprobs=[-1.0, -2.0])],
        [output([73], "stop", replica="r2", logprobs=[-3.0])],  # the first answer goes on
    ]
    body = {"prompt": [20, 21], "n": 2, "seed": 5, "return_token_ids": True, "logprobs": 0}
    answer = client.post("/v1/completions", json=body).json()
    by_seed: dict[Any, list[Any]] = {}
    for request, _ in engines.calls:
        by_seed.setdefault(request.params.seed, []).append(request.output_token_ids)
    assert by_seed == {5: [[], [70]], 6: [[]]}
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70, 73], [71, 72]]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-1.0, -3.0], [-1.0, -2.0]]
