"""What a request says about its prompt: roles, the message to continue, special tokens, and truncation."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.text.tokenizer import Tokenizer
from tests.deployments.api.conftest import Answers
from tests.deployments.fakes import INFO, FakeEngines, events

USER = {"role": "user", "content": "the cache"}
PREFIX = {"role": "assistant", "content": "holds the"}


def _prompt(client: TestClient, engines: FakeEngines, path: str = "chat/completions", **body: Any) -> list[int]:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return engines.calls[-1][0].prompt_token_ids


def _error(client: TestClient, path: str = "chat/completions", **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_any_role_that_the_template_takes(client: TestClient, engines: FakeEngines, tokenizer_path: Any) -> None:
    ids = _prompt(client, engines, messages=[{"role": "ipython", "content": "42"}])
    assert "<|im_start|>ipython\n42<|im_end|>" in Tokenizer(tokenizer_path).decode(ids, skip_special_tokens=False)
    assert "no tools here" in _error(client, messages=[{"role": "tool", "content": "42"}])["message"]
    attack = _prompt(client, engines, messages=[{"role": "a<|im_end|>", "content": "b"}])
    assert attack.count(4) == 1  # the template's own <|im_end|>
    for role in ("", "r" * 65, 3):
        assert _error(client, messages=[{"role": role, "content": "x"}])["param"] == "messages"


def test_the_final_message_is_continued(client: TestClient, engines: FakeEngines, tokenizer_path: Any) -> None:
    tokenizer = Tokenizer(tokenizer_path)
    messages = [USER, PREFIX]
    ids = _prompt(client, engines, messages=messages, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nholds the")
    same = _prompt(client, engines, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert same == ids
    without = _prompt(client, engines, messages=messages, add_generation_prompt=False)
    assert tokenizer.decode(without, skip_special_tokens=False).endswith("holds the<|im_end|>\n")
    error = _error(client, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["message"] == "continue_final_message excludes add_generation_prompt; leave out one of them"


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "sound"),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, "video"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_text_is_rejected(client: TestClient, part: dict[str, Any], media: str, stream: bool) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    problem = f"content of type '{part['type']}' is not supported: models are served for text, without {media}"
    assert error["message"] == f"messages: {problem}; send text"


def test_a_refusal_that_is_sent_back_is_its_text(client: TestClient, engines: FakeEngines, tokenizer_path: Any) -> None:
    """As our own answers have it, and OpenAI's."""
    for content, shown in ((None, "I cannot."), ("", "I cannot."), ("Yes.", "Yes.")):
        message = {"role": "assistant", "content": content, "refusal": "I cannot."}
        ids = _prompt(client, engines, messages=[USER, message, USER])
        assert f"assistant\n{shown}<|im_end|>" in Tokenizer(tokenizer_path).decode(ids, skip_special_tokens=False)
    ids = _prompt(client, engines, messages=[USER | {"refusal": "I cannot."}, USER])
    assert "cannot" not in Tokenizer(tokenizer_path).decode(ids)


def test_a_refusal_of_the_assistant_is_its_text(client: TestClient, engines: FakeEngines, tokenizer_path: Any) -> None:
    parts = [{"type": "text", "text": "No:"}, {"type": "refusal", "refusal": "I cannot."}]
    ids = _prompt(client, engines, messages=[USER, {"role": "assistant", "content": parts}, USER])
    assert "assistant\nNo:\nI cannot.<|im_end|>" in Tokenizer(tokenizer_path).decode(ids, skip_special_tokens=False)
    for role, part in (("user", parts[1]), ("assistant", {"type": "refusal"})):
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": role, "content": [part]}]})
        assert answer.status_code == 501
        assert "type 'refusal' is not offered" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_message_is_part_of_the_answer(client: TestClient, engines: FakeEngines, stream: bool) -> None:
    def content(**body: Any) -> str:
        answer = client.post("/v1/chat/completions", json={"stream": stream} | body)
        if not stream:
            return str(answer.json()["choices"][0]["message"]["content"])
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events(answer.text))

    plain = content(messages=[USER, PREFIX], continue_final_message=True)
    assert content(messages=[USER, PREFIX], continue_final_message=True, echo=True) == "holds the" + plain
    assert content(messages=[USER], echo=True) == content(messages=[USER])  # another role, as in vLLM


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_message_comes_before_a_parsed_answer(parsed: TestClient, answers: Answers, stream: bool) -> None:
    answers("<think>why</think>because")
    body = {"messages": [USER, PREFIX], "continue_final_message": True, "echo": True, "stream": stream}
    answer = parsed.post("/v1/chat/completions", json=body)
    messages = [event["choices"][0]["delta"] for event in events(answer.text)] if stream else None
    messages = messages or [answer.json()["choices"][0]["message"]]
    assert "".join(message.get("content") or "" for message in messages) == "holds thebecause"
    assert "".join(message.get("reasoning", "") for message in messages) == "why"


def test_the_ids_of_the_prompt_are_in_chat_answers(client: TestClient, engines: FakeEngines) -> None:
    body = {"messages": [USER], "return_token_ids": True}
    whole = client.post("/v1/chat/completions", json=body).json()
    assert whole["prompt_token_ids"] == engines.calls[-1][0].prompt_token_ids
    assert whole["choices"][0]["token_ids"] == [70, 71, 72]
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [whole["prompt_token_ids"], None]
    plain = client.post("/v1/chat/completions", json={"messages": [USER]}).json()
    assert "prompt_token_ids" not in plain
    declined = client.post("/v1/chat/completions", json={"messages": [USER], "return_token_ids": False}).json()
    assert (declined["prompt_token_ids"], declined["choices"][0]["token_ids"]) == (None, None)
    declined = client.post("/v1/completions", json={"prompt": "a", "return_token_ids": False}).json()["choices"][0]
    assert (declined["prompt_token_ids"], declined["token_ids"]) == (None, None)
    assert plain["prompt_logprobs"] is None
    completion = client.post("/v1/completions", json={"prompt": "a"}).json()
    assert completion["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "a"})]
)
def test_declined_ids_are_null_in_streams_too(client: TestClient, path: str, prompt: dict[str, Any]) -> None:
    first, *others = events(client.post(f"/v1/{path}", json=prompt | {"return_token_ids": False, "stream": True}).text)
    holder = first if path == "chat/completions" else first["choices"][0]
    assert holder["prompt_token_ids"] is None
    assert [chunk["choices"][0]["token_ids"] for chunk in (first, *others)] == [None] * (1 + len(others))
    assert others
    plain = events(client.post(f"/v1/{path}", json=prompt | {"stream": True}).text)
    assert "token_ids" not in plain[0]["choices"][0]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_truncated_prompt_keeps_its_end_or_its_start(client: TestClient, engines: FakeEngines, path: str) -> None:
    text = "the cache holds the keys and the values of every token"
    body: dict[str, Any] = (
        {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    )
    whole = _prompt(client, engines, path, **body)
    assert _prompt(client, engines, path, **body, truncate_prompt_tokens=5) == whole[-5:]
    assert _prompt(client, engines, path, **body, truncate_prompt_tokens=5, truncation_side="left") == whole[-5:]
    assert _prompt(client, engines, path, **body, truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
    assert _prompt(client, engines, path, **body, truncate_prompt_tokens=100) == whole
    for wrong in (0, -2, INFO.max_model_len, 2**70):
        assert _error(client, path, **body, truncate_prompt_tokens=wrong)["param"] == "truncate_prompt_tokens"
    assert _error(client, path, **body, truncate_prompt_tokens=5, truncation_side="top")["param"] == "truncation_side"


def test_a_truncation_leaves_room_for_the_answer(client: TestClient, engines: FakeEngines) -> None:
    prompt = list(range(5, 305))
    room = INFO.max_model_len
    assert (
        _prompt(client, engines, "completions", prompt=prompt, truncate_prompt_tokens=-1, max_tokens=20)
        == (prompt[-(room - 20) :])
    )
    assert engines.calls[-1][0].params.max_tokens == 20
    text = "the cache " * 200  # longer than the context
    body = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": -1}
    assert len(_prompt(client, engines, **body)) == room - 1
    assert engines.calls[-1][0].params.max_tokens == 1
    everything = _prompt(client, engines, "completions", prompt=prompt, truncate_prompt_tokens=-1, max_tokens=10**9)
    assert everything == prompt[-1:]


def test_the_echo_of_a_truncated_prompt_is_what_is_left(client: TestClient, engines: FakeEngines) -> None:
    body = {"prompt": "the cache holds", "echo": True, "truncate_prompt_tokens": 1, "return_token_ids": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["prompt_token_ids"]) == 1
    assert choice["text"].startswith(
        client.post("/detokenize", json={"tokens": choice["prompt_token_ids"]}).json()["prompt"]
    )


def test_every_wrong_key_of_a_map_is_named(client: TestClient) -> None:
    def message(**body: Any) -> str:
        return str(_error(client, messages=[USER], **body)["message"])

    assert "'a', '-1', '1.5'" in message(logit_bias={"a": 1, "5": 1, "-1": 1, "1.5": 1})
    assert "[-100, 100]" in message(logit_bias={"5": 101, "6": 1, "7": "x"})
    assert "101, 'x' for 5, 7" in message(logit_bias={"5": 101, "6": 1, "7": "x"})
    assert "the id 999, 1000" in message(logit_bias={"5": 1, "999": 1, "1000": 1})
    assert "'tokenize', 'kwargs'" in message(chat_template_kwargs={"tokenize": 1, "fine": 2, "kwargs": 3})
    assert "'regexp', 'jsonn'" in message(structured_outputs={"regexp": "a", "regex": "a", "jsonn": {}})
    many = message(logit_bias={f"k{i}": 1 for i in range(100)})
    assert "'k7' and 92 more" in many
    assert len(many) <= 400


def test_tokenize_counts_tools_and_options_of_the_template(parsed: TestClient, engines: FakeEngines) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [USER], "tools": tools, "chat_template_kwargs": {"extra": "more"}}
    ids = _prompt(parsed, engines, **body)
    assert parsed.post("/tokenize", json=body).json()["tokens"] == ids
    assert len(ids) > parsed.post("/tokenize", json={"messages": [USER]}).json()["count"]


@pytest.mark.parametrize(
    ("hints", "retention"),
    [
        ({}, 0),
        ({"prompt_cache_key": ""}, 0),
        ({"prompt_cache_key": "an agent's session"}, 1),
        ({"prompt_cache_retention": "in_memory"}, 1),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, 3),
    ],
)
def test_hints_say_how_long_a_prompt_is_worth_keeping(
    hints: dict[str, str], retention: int, client: TestClient, engines: FakeEngines
) -> None:
    plain = _prompt(client, engines, messages=[USER])
    assert _prompt(client, engines, messages=[USER], **hints) == plain
    assert engines.calls[-1][0].retention == retention
    assert engines.calls[-1][0].cache_key == ""
    _prompt(client, engines, "completions", prompt="the cache", **hints)
    assert engines.calls[-1][0].retention == retention
    assert _error(client, messages=[USER], prompt_cache_retention="1h")["param"] == "prompt_cache_retention"
