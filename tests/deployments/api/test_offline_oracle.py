"""Requests over HTTP give the tokens that the offline LLM gives, on the same demo model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.config import checkout_root
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import events
from tests.deployments.real_engines import RealEngines

DEMO = str(checkout_root() / "demo" / "model")
PROMPTS = ["Once upon a time", "A KV cache keeps", "What is"]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is a KV cache?"},
    {"role": "assistant", "content": "A KV cache keeps"},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The demo model in float32, in which no two tokens are equally likely."""
    return LLM(DEMO, dtype="float32", kv_cache_memory="64MiB", max_logprobs=-1)


@pytest.fixture
def engines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> RealEngines:
    """The engine of ``llm``."""
    engines = RealEngines(llm.engine)
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: engines)
    return engines


@pytest.fixture
def demo(open_client: OpenClient) -> TestClient:
    """A client of the demo model."""
    return open_client(model=DEMO, model_name="demo")


def _choices(client: TestClient, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    answer = client.post(f"/v1/{path}", json={"return_token_ids": True} | body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (5, -1.5)])
def test_beams(demo: TestClient, llm: LLM, width: int, penalty: float) -> None:
    params = SamplingParams(n=width, beam_width=width, temperature=0.0, length_penalty=penalty, max_tokens=24)
    for prompt, expected in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        choices = _choices(demo, prompt=prompt, use_beam_search=True, n=width, length_penalty=penalty, max_tokens=24)
        assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in expected.outputs]
        assert [choice["text"] for choice in choices] == [output.text for output in expected.outputs]
        assert [choice["finish_reason"] for choice in choices] == [output.finish_reason for output in expected.outputs]


def test_a_continued_message(demo: TestClient, llm: LLM) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "continue_final_message": True}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    tokens = demo.post("/tokenize", json=asked).json()["tokens"]
    (expected,) = llm.generate(
        [{"prompt_token_ids": tokens}], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False
    )
    (chat,) = _choices(demo, "chat/completions", **asked, **greedy)
    assert (chat["prompt_token_ids"], chat["token_ids"]) == (tokens, expected.outputs[0].token_ids)
    (echoed,) = _choices(demo, "chat/completions", **asked, **greedy, echo=True)
    assert echoed["message"]["content"] == "A KV cache keeps" + chat["message"]["content"]


def test_listed_log_probabilities(demo: TestClient, llm: LLM) -> None:
    ids = [5, 40, 41, 300]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, logprob_token_ids=ids)
    (expected,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 0, "logprob_token_ids": ids}
    (choice,) = _choices(demo, prompt=PROMPTS[0], **asked, return_tokens_as_token_ids=True)
    for position, tops in zip(expected.outputs[0].logprobs or (), choice["logprobs"]["top_logprobs"], strict=True):
        named = {f"token_id:{token_id}": logprob.logprob for token_id, logprob in position.items()}
        assert tops == pytest.approx(named, abs=1e-4)
        assert set(ids) <= set(position)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_whole_vocabulary(demo: TestClient, llm: LLM, stream: bool) -> None:
    """Of chat and of a completion with its prompt, whole and streamed; only a whole one has ``prompt_logprobs``."""
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    (expected,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    positions = [*(expected.prompt_logprobs or []), *(expected.outputs[0].logprobs or [])]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "stream": stream, "return_tokens_as_token_ids": True}

    def choices(path: str, **body: Any) -> list[dict[str, Any]]:
        answer = demo.post(f"/v1/{path}", json=asked | body)
        assert answer.status_code == 200, answer.text
        return [body["choices"][0] for body in (events(answer.text) if stream else [answer.json()])]

    echoed = choices("completions", prompt=PROMPTS[0], echo=True, logprobs=-1)
    tops = [top_of_choice for choice in echoed for top_of_choice in choice["logprobs"]["top_logprobs"]]
    assert tops[0] is None
    for top, position in zip(tops[1:], positions[1:], strict=True):
        assert position is not None
        assert top == pytest.approx({f"token_id:{i}": logprob.logprob for i, logprob in position.items()}, abs=1e-4)
    if not stream:
        (whole,) = choices("completions", prompt=PROMPTS[0], prompt_logprobs=-1)
        assert [position and len(position) for position in whole["prompt_logprobs"]] == [None] + [4040] * (
            len(positions) - 3
        )
    chat = choices("chat/completions", messages=MESSAGES[:1], logprobs=True, top_logprobs=-1)
    content = [entry for choice in chat for entry in choice["logprobs"]["content"]]
    assert [len(entry["top_logprobs"]) for entry in content] == [4040] * 2
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-4)


def test_a_truncated_prompt(demo: TestClient, llm: LLM) -> None:
    tokens = demo.post("/tokenize", json={"prompt": "one two three four five six seven"}).json()["tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (expected,) = llm.generate([{"prompt_token_ids": tokens[-4:]}], params, use_tqdm=False)
    (choice,) = _choices(demo, prompt=tokens, truncate_prompt_tokens=4, temperature=0, max_tokens=8)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (tokens[-4:], expected.outputs[0].token_ids)


def test_a_chat(demo: TestClient, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES[:1], SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    (choice,) = _choices(demo, "chat/completions", messages=MESSAGES[:1], temperature=0, max_tokens=20)
    assert (choice["token_ids"], choice["message"]["content"]) == (
        expected.outputs[0].token_ids,
        expected.outputs[0].text,
    )
