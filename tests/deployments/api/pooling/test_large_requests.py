"""Requests of thousands of texts are read and answered in steps, between which other requests get their turns."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import numpy as np
import pytest

from deployments.api.body import JsonBody, parse_body
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.pooling.encoding import PART_BYTES, list_response, vectors
from deployments.api.pooling.protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from deployments.api.pooling.serving import Pooled
from deployments.errors import ApiError
from deployments.large_json import STEP

TEXTS = ["a word, and 'another' " * 20] * 2048
IDS = list(range(1000, 200_000))
LISTS = [list(range(number, number + 100)) for number in range(2048)]
BODIES: dict[str, tuple[type[JsonBody], str, Any, dict[str, Any]]] = {
    "embeddings": (EmbeddingRequest, "input", TEXTS, {}),
    "embeddings of ids": (EmbeddingRequest, "input", LISTS, {}),
    "embedding of ids": (EmbeddingRequest, "input", IDS, {}),
    "score": (ScoreRequest, "text_2", TEXTS, {"text_1": "a"}),
    "rerank": (RerankRequest, "documents", [{"text": text} for text in TEXTS], {"query": "a"}),
    "classify": (ClassifyRequest, "input", TEXTS, {}),
    "completions": (CompletionRequest, "prompt", TEXTS, {}),
    "completions of ids": (CompletionRequest, "prompt", LISTS, {}),
    "completion of ids": (CompletionRequest, "prompt", IDS, {}),
    "chat": (ChatRequest, "messages", [{"role": "user", "content": text} for text in TEXTS], {}),
}


class Pauses:
    """Counts the pauses in which the interpreter's lock is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        monkeypatch.setattr("time.sleep", self._pause)

    def _pause(self, seconds: float) -> None:
        self.number += 1


def as_lists(value: Any) -> Any:
    """Return a field of a body with lists and texts only."""
    if isinstance(value, array | list):
        return [as_lists(item) for item in value]
    return value if isinstance(value, str | int) else {"role": value.role, "content": value.text}


@pytest.mark.parametrize("name", BODIES)
def test_a_long_body_is_read_in_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, field, value, others = BODIES[name]
    data = json.dumps({field: value, **others}, ensure_ascii=False).encode()
    pauses = Pauses(monkeypatch)
    body = parse_body(kind, data)
    assert pauses.number >= len(data) / STEP - 2
    expected = TEXTS if name == "rerank" else value
    assert as_lists(getattr(body, field)) in (expected, [expected])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([*LISTS, [1, -1]], "input[2048][1]=-1 is invalid: give a text, its token ids from 0"),
        ([*IDS, 2**31], "input[199000]=2147483648 is invalid"),
        ([*IDS, True], "input[199000]=True is invalid"),
        ([*LISTS, "a"], "input[2048]='a' is invalid"),
        ([*TEXTS, [1]], "input[2048]=[1] is invalid"),
        ({"a": 1}, "input={'a': 1} is invalid"),
        ([None], "input[0]=None is invalid"),
    ],
)
def test_an_error_names_the_first_invalid_item(value: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(EmbeddingRequest, json.dumps({"input": value}).encode())
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "input")


@pytest.mark.parametrize("as_base64", [False, True])
async def test_a_long_list_is_written_in_parts(*, as_base64: bool) -> None:
    """The event loop turns after each part, and so it does when the parts are sent."""
    rows = np.random.default_rng(0).standard_normal((300, 1024)).astype("<f4")
    pooled = Pooled("id", 0, [row.tobytes() for row in rows], 7, "replica")
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    items = vectors(pooled, kind="embedding", key="embedding", as_base64=as_base64)
    response = await list_response(pooled, {"object": "list"}, items)
    counting.cancel()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await response({"type": "http"}, lambda: asyncio.sleep(0), send)
    parts = [message["body"] for message in sent[1:]]
    content = json.loads(b"".join(parts))
    assert [item["index"] for item in content["data"]] == list(range(300))
    item_bytes = len(json.dumps(content["data"][0]))
    assert max(map(len, parts)) < PART_BYTES + 2 * item_bytes
    assert num_turns >= len(b"".join(parts)) // (PART_BYTES + 2 * item_bytes)
    if not as_base64:
        assert np.array_equal(np.array([item["embedding"] for item in content["data"]], "<f4"), rows)
