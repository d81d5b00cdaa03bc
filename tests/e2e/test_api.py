"""The OpenAI client against the real server: chat and completions, streamed and whole."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai

MODEL = "pagoda-demo"
MESSAGES: Any = [{"role": "user", "content": "Hello! Who are you?"}]


def test_chat_answers_with_text(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0)
    assert re.search(r"[A-Za-z]{2,}", answer.choices[0].message.content or "")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_streamed_chat_gives_the_same_text(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0)
    options: Any = {"include_usage": True}
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0, stream=True, stream_options=options
        )
    )
    *deltas, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == whole.choices[0].message.content
    assert deltas[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in deltas[1:])
    reasons = [chunk.choices[0].finish_reason for chunk in deltas]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details is not None
    assert all(chunk.usage is None for chunk in deltas)


def test_completions_whole_and_streamed(api: openai.OpenAI) -> None:
    whole = api.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0)
    stream = api.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"


def test_several_prompts_are_several_choices(api: openai.OpenAI) -> None:
    prompts = [f"Number {number} is" for number in range(6)]
    together = api.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0)
    alone = [api.completions.create(model=MODEL, prompt=text, max_tokens=6, temperature=0) for text in prompts]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]


def test_the_default_of_completions_is_16_tokens(api: openai.OpenAI) -> None:
    answer = api.completions.create(model=MODEL, prompt="a b c", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[6:9]
    answer = http.post("/v1/completions", json=body | {"stop": stop}).json()["choices"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    kept = http.post("/v1/completions", json=body | {"stop": stop, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == text[: text.index(stop) + 3]


def test_the_same_seed_gives_the_same_text(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    first, second = (http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2))
    assert first == second


def test_token_ids_on_request(http: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 4


def test_events_are_framed_and_end_with_done(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "my-id"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "my-id"
        assert answer.headers["x-pagoda-replica"]
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in [event for event in events[:-2] if event != ":"]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_a_request_id_is_generated_if_none_is_given(http: httpx.Client) -> None:
    assert http.get("/version").headers["x-request-id"]


def test_models_health_and_version(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert http.get(f"/v1/models/{MODEL}").json()["max_model_len"] > 0
    assert http.get("/v1/models/none").status_code == 404
    assert http.get("/health").status_code == 200
    assert http.get("/version").json()["version"]
