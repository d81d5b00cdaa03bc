"""Log-probabilities in the API's shapes: of chat, of completions, of prompts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.api import generations
from deployments.api.openai.logprobs import LOWEST, CompletionLogprobs, chat_logprobs, prompt_logprobs
from deployments.api.prompts import MAX_INLINE_COST, PromptBuilder
from deployments.requests.generation import Generation
from engine.outputs import Logprob, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from tests.deployments.fakes import FakeEngines, events, output
from tests.engine.text.tokenizers import KINDS, NEIGHBOURS, load_kind

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cache"}], "logprobs": True}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer(tokenizer_path)


def _position(*pairs: tuple[int, float]) -> TokenLogprobs:
    return {token_id: Logprob(logprob, rank) for rank, (token_id, logprob) in enumerate(pairs, start=1)}


def test_a_token_is_shown_as_text_and_as_bytes(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("a€"), 4]
    shown = chat_logprobs(tokenizer, token_ids, [_position((token_id, -1.0)) for token_id in token_ids], 0)["content"]
    assert bytes(byte for entry in shown for byte in entry["bytes"]) == "a€<|im_end|>".encode()
    assert shown[0] == {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    assert shown[1]["token"] == "�"  # a part of a character has no text, but it has bytes
    assert shown[-1]["token"] == "<|im_end|>"


def test_top_logprobs_are_in_order_and_as_many_as_requested(tokenizer: Tokenizer) -> None:
    position = _position((70, -3.0), (71, -0.5), (72, -1.5))  # the sampled token comes first
    (entry,) = chat_logprobs(tokenizer, [70], [position], 2)["content"]
    assert entry["logprob"] == -3.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5]


def test_only_a_whole_response_keeps_all_log_probabilities(
    client: TestClient, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's are in its chunks, and those of a long answer would take megabytes."""
    watched: list[Generation] = []

    class Watched(Generation):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            watched.append(self)

    monkeypatch.setattr(generations, "Generation", Watched)
    engines.scripts = [[output([70], logprobs=[-0.5]), output([71, 2], "stop", logprobs=[-0.25, -1.0])]]
    for stream in (False, True):
        assert client.post("/v1/chat/completions", json=CHAT | {"stream": stream}).status_code == 200
    assert [len(generation.logprobs) for generation in watched] == [3, 0]


def test_json_has_no_infinity(tokenizer: Tokenizer) -> None:
    position = _position((70, -math.inf))
    assert chat_logprobs(tokenizer, [70], [position], 1)["content"][0]["top_logprobs"][0]["logprob"] == LOWEST
    shown = CompletionLogprobs(tokenizer, 1, skip_special_tokens=True).add([70], [position])
    assert (shown["token_logprobs"], list(shown["top_logprobs"][0].values())) == ([LOWEST], [LOWEST])
    assert prompt_logprobs(tokenizer, [None, position], 0)[1] == {
        70: {"logprob": LOWEST, "rank": 1, "decoded_token": tokenizer.decode([70])}
    }


def test_text_offsets_are_positions_in_the_text(tokenizer: Tokenizer) -> None:
    text = "the ñ and the 🙂 end"
    token_ids = [1, *tokenizer.encode(text), 4]
    writer = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True)
    halves = [writer.add(part, [None] * len(part)) for part in (token_ids[:9], token_ids[9:])]
    offsets = halves[0]["text_offset"] + halves[1]["text_offset"]
    assert offsets[0] == offsets[1] == 0  # a special token is not in the text
    assert offsets[-1] == len(text)
    for token_id, offset in zip(token_ids[1:-1], offsets[1:-1], strict=True):
        spelled = tokenizer.token_bytes(token_id)
        assert text[offset:].encode().find(spelled) in range(4), (spelled, offset)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NEIGHBOURS])
@pytest.mark.parametrize("skip", [True, False])
def test_tokens_join_to_the_text_and_have_its_offsets(kind: str, skip: bool) -> None:
    """On every kind of tokenizer: of an echoed prompt, sent as text or as ids, and of its answer."""
    tokenizer = load_kind(kind)
    for sent, answer in (("the keys", "    and\n  the 🙂 é"), ("the 🙂", "🙂 the"), ("", "the keys")):
        ids = [1, *tokenizer.encode(sent), *tokenizer.encode(answer)]
        end = len(ids) - len(tokenizer.encode(answer))
        decoded = tokenizer.decode(ids[:end], skip_special_tokens=skip)
        for echo in {decoded, sent if sent in decoded else decoded}:
            writer = CompletionLogprobs(tokenizer, 1, skip_special_tokens=skip, prompt_token_ids=ids[:end])
            positions = [_position((token_id, -1.0)) for token_id in ids]
            written = [writer.add_prompt(ids[:end], positions[:end], echo), writer.add(ids[end:], positions[end:])]
            text = echo + tokenizer.decode(ids, skip_special_tokens=skip).removeprefix(decoded)
            offsets, names = ([*written[0][key], *written[1][key]] for key in ("text_offset", "tokens"))
            assert offsets == sorted(offsets)
            assert [list(top) for top in written[1]["top_logprobs"]] == [[name] for name in written[1]["tokens"]]
            first = 0 if echo == decoded else end  # the text that was sent lacks what the tokenizer adds
            for name, offset, token_id in list(zip(names, offsets, ids, strict=True))[first:]:
                if "\ufffd" not in name and not (skip and tokenizer.is_special(token_id)):
                    assert text[offset:].startswith(name), (name, text, offset)


def test_of_tokens_with_the_same_text_the_most_likely_is_listed(tokenizer: Tokenizer) -> None:
    parts = tokenizer.encode("🙂")[-2:]  # neither is a character
    writer = CompletionLogprobs(tokenizer, 2, skip_special_tokens=True)
    assert writer.add(parts[:1], [_position((parts[0], -2.0), (parts[1], -1.0))])["top_logprobs"] == [{"�": -1.0}]


def test_chat_whole_and_streamed_say_the_same(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([70], logprobs=[-0.5]), output([71, 72], "stop", logprobs=[-1.0, -2.0])]]
    whole = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["logprobs"]
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == whole["content"]
    assert [entry["logprob"] for entry in streamed] == [-0.5, -1.0, -2.0]
    plain = client.post("/v1/chat/completions", json=CHAT | {"logprobs": False}).json()
    assert plain["choices"][0]["logprobs"] is None


def test_prompt_logprobs_of_chat_and_completions(client: TestClient, engines: FakeEngines) -> None:
    known = [None, _position((22, -2.0), (23, -0.5))]
    engines.scripts = [[output([70], "stop", prompt_logprobs=known)]]
    chat = client.post("/v1/chat/completions", json=CHAT | {"logprobs": None, "prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"][0] is None
    assert list(chat["prompt_logprobs"][1]) == ["22"]
    plain = client.post("/v1/completions", json={"prompt": [21, 22], "prompt_logprobs": 1}).json()["choices"][0]
    assert plain["prompt_logprobs"][1]["23"]["logprob"] == -0.5
    assert plain["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_what_lm_eval_sends(client: TestClient, engines: FakeEngines, stream: bool) -> None:
    known = [None, _position((71, -2.0), (5, -0.5)), _position((72, -0.25))]
    engines.scripts = [[output([75], "length", logprobs=[-9.0], prompt_logprobs=known)]]
    body = {"prompt": [70, 71, 72], "echo": True, "logprobs": 1, "temperature": 0, "stream": stream}
    for max_tokens, generated in ((0, []), (1, [-9.0])):
        answer = client.post("/v1/completions", json=body | {"max_tokens": max_tokens})
        choice = (events(answer.text)[0] if stream else answer.json())["choices"][0]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, -2.0, -0.25, *generated]
        assert logprobs["top_logprobs"][0] is None
        assert max(logprobs["top_logprobs"][1].values()) == -0.5  # not of the prompt's token
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"] == [choice["text"].index(token) for token in logprobs["tokens"]]
        assert choice["finish_reason"] == "length"
    assert stream or answer.json()["usage"]["completion_tokens"] == 1


def test_an_echoed_prompt_and_its_answer_are_one_text(
    client: TestClient, engines: FakeEngines, tokenizer: Tokenizer
) -> None:
    """The prompt's ids end inside a character, which the answer completes."""
    ids = tokenizer.encode("a🙂b")
    body = {"prompt": ids[:3], "echo": True, "logprobs": 0, "temperature": 0}
    engines.scripts = [[output(ids[3:], "stop", logprobs=[-1.0] * len(ids[3:]), prompt_logprobs=[None] * 3)]]
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a🙂b", [0, 1, 1, 1, 1, 2])
    scored = client.post("/v1/completions", json=body | {"max_tokens": 0}).json()["choices"][0]
    assert scored["text"] == "a\ufffd"  # no answer completes it


def test_a_prompt_is_echoed_as_it_was_sent(client: TestClient, engines: FakeEngines) -> None:
    body = {"prompt": ["the  cache", "hits"], "echo": True, "n": 2, "temperature": 1}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    streamed = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)]
    assert [choice["text"] for choice in choices] == streamed
    assert [text.startswith("the  cache") for text in streamed] == [True, True, False, False]
    assert [text.startswith("hits") for text in streamed] == [False, False, True, True]


def test_an_answer_that_failed_at_once_has_no_logprobs(client: TestClient, engines: FakeEngines) -> None:
    engines.scripts = [[output([], "abort")]]
    body = {"prompt": [70, 71], "echo": True, "logprobs": 1}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["logprobs"]["token_logprobs"], choice["finish_reason"]) == ([None, None], "abort")


def test_many_logprobs_are_written_in_a_thread(
    client: TestClient, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: list[int] = []
    run = PromptBuilder.run_with_tokenizer

    async def recorded(builder: PromptBuilder, work: Any, *, cost: int) -> Any:
        costs.append(cost)
        return await run(builder, work, cost=cost)

    monkeypatch.setattr(PromptBuilder, "run_with_tokenizer", recorded)
    known = [None, *[_position(*((token_id, -float(token_id)) for token_id in range(5, 26)))] * 99]
    engines.scripts = [[output([70], "stop", prompt_logprobs=known)]]
    answer = client.post("/v1/completions", json={"prompt": [5] * 100, "prompt_logprobs": 20})
    assert len(answer.json()["choices"][0]["prompt_logprobs"][99]) == 21
    assert costs[-1] > MAX_INLINE_COST
