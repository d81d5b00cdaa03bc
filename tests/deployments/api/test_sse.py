"""A stream of events, whose deltas come from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from deployments.api import sse
from deployments.api.sse import COMMENT, COMMENT_S, EventStream
from deployments.errors import ApiError
from deployments.requests.generation import Delta
from tests.engine.observability.clock import Clock


class Events:
    """Writes the text of a delta as it is."""

    num_choices = 1

    def chunk(self, delta: Delta) -> bytes:
        return delta.text.encode()

    def error(self, error: ApiError) -> bytes:
        return b"error"

    def end(self) -> bytes:
        return b"end"


async def _sent(first: Delta | None, *others: Delta | None, pause: Callable[[], None] = lambda: None) -> list[bytes]:
    """Return the chunks of a response, each of whose deltas after the first comes after a pause."""
    sent: list[bytes] = []

    async def deltas() -> AsyncGenerator[Delta | None, None]:
        for delta in others:
            await asyncio.sleep(0)
            pause()
            yield delta

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    events: Any = Events()
    await EventStream(first, deltas(), events, {})({"type": "http"}, receive, send)
    return sent


async def test_comments_while_there_are_no_tokens() -> None:
    sent = await _sent(None, None, Delta(0, "a", [1]), None, Delta(0, "b", [2], "stop"))
    assert sent == [COMMENT, COMMENT, b"a", COMMENT, b"bend"]


@pytest.mark.parametrize(
    ("pause_s", "expected"),
    [(0.5 * COMMENT_S, [b"a", b"cend"]), (1.1 * COMMENT_S, [b"a", COMMENT, COMMENT, b"cend"])],
)
async def test_comments_while_a_parser_holds_back_text(
    pause_s: float, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(sse, "monotonic", clock)

    def pause() -> None:
        clock.now += pause_s

    held = [Delta(0, "", [token]) for token in (2, 3)]
    assert await _sent(Delta(0, "a", [1]), *held, Delta(0, "c", [4], "stop"), pause=pause) == expected
