"""BodyReader: limits of a body's length and of its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from starlette.requests import Request
from starlette.types import Message

from deployments.api.body import BYTES_PER_S, BodyReader
from deployments.api.openai.protocol import CompletionRequest
from deployments.api.turns import REQUESTS_PER_TURN
from deployments.errors import ApiError
from deployments.proxy.client_rules import CLIENT_HEADER
from tests.virtual_clock import VirtualClockLoop
from tests.waiting import HANG_S

BODY = b'{"prompt": "a", "user": "' + b"x" * 2 * BYTES_PER_S + b'"}'


def _request(pieces: Sequence[bytes], pause_s: float, client: str = "") -> Request:
    """Return a request whose body comes in pieces, and then pauses for ever."""
    left = list(pieces)

    async def receive() -> Message:
        await asyncio.sleep(pause_s if left else 3600)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or b"".join(pieces) != BODY}

    headers = [(b"content-type", b"application/json"), (CLIENT_HEADER.encode(), client.encode())]
    return Request({"type": "http", "headers": headers}, receive)


def _read(pieces: Sequence[bytes], pause_s: float, timeout_s: float) -> CompletionRequest:
    reader = BodyReader(max_bytes=2**20, timeout_s=timeout_s)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(reader.read(CompletionRequest, _request(pieces, pause_s)))


def test_a_slow_body_gets_the_time_of_its_bytes() -> None:
    """At a third of the time for each piece, three of four would already be too late."""
    quarter = len(BODY) // 4 + 1
    pieces = [BODY[start : start + quarter] for start in range(0, len(BODY), quarter)]
    assert len(pieces) == 4
    assert _read(pieces, pause_s=0.5, timeout_s=1.0).prompt == ["a"]


@pytest.mark.parametrize("pieces", [[], [BODY[:10]], [BODY[:1], BODY[1:2], BODY[2:3], BODY[3:4]]])
def test_a_body_that_does_not_come_is_a_timeout(pieces: list[bytes]) -> None:
    with pytest.raises(ApiError, match="send it without pauses") as caught:
        _read(pieces, pause_s=3.0, timeout_s=10.0)
    assert (caught.value.status, caught.value.code) == (408, "timeout")
    assert caught.value.headers["Connection"] == "close"


async def test_a_client_does_not_wait_for_the_end_of_anothers_burst() -> None:
    reader, went_on = BodyReader(max_bytes=2**20, timeout_s=HANG_S), list[str]()

    async def read(client: str) -> None:
        await reader.read(CompletionRequest, _request([BODY], 0.0, client))
        went_on.append(client)

    await asyncio.gather(*(read("greedy") for _ in range(3 * REQUESTS_PER_TURN)), read("other"))
    assert went_on.index("other") < 2 * REQUESTS_PER_TURN
