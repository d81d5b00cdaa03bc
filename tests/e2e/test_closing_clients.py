"""Clients that close their side of the connection, or all of it, while a stream waits or runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.e2e.conftest import MAX_RUNNING
from tests.e2e.hostile import request
from tests.e2e.losses import stopped_engines, until_unfinished
from tests.e2e.server import Server
from tests.waiting import HANG_S, until_async

pytestmark = pytest.mark.long

COMMENT = b":\n\n"
MAX_ROUNDS = 5
PROMPT = {"prompt": "A client that closes", "ignore_eos": True}


@asynccontextmanager
async def _client(
    server: Server, *, half_closes: bool = False, **body: object
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send a request for a stream; close the connection at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        data = json.dumps(PROMPT | {"stream": True} | body).encode()
        writer.write(request("POST", "/v1/completions", [], data))
        if half_closes:
            writer.write_eof()
        yield reader, writer
    finally:
        writer.close()


def _tokens(answer: bytes) -> int:
    """Return the number of tokens in the pieces of a stream."""
    lines = [line for line in answer.splitlines() if line.startswith(b"data: {")]
    return sum(len(json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]) for line in lines)


async def test_a_client_that_closes_its_side_gets_its_stream(small_server: Server) -> None:
    body = {"max_tokens": 200, "return_token_ids": True}
    async with _client(small_server, half_closes=True, **body) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), HANG_S)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert _tokens(answer) == 200
    assert b"data: [DONE]" in answer


async def test_it_gets_a_stream_that_waited(small_server: Server) -> None:
    async with AsyncExitStack() as clients:
        with stopped_engines(small_server):
            body = {"max_tokens": 20, "return_token_ids": True}
            reader, _ = await clients.enter_async_context(_client(small_server, half_closes=True, **body))
            before = await asyncio.wait_for(reader.readuntil(COMMENT), HANG_S)
        answer = await asyncio.wait_for(reader.read(), HANG_S)
    assert before.startswith(b"HTTP/1.1 200 ")
    assert b"data: " not in before
    assert _tokens(answer) == 20
    assert b"data: [DONE]" in answer


async def test_a_stream_ends_when_its_client_has_gone(small_server: Server) -> None:
    """It is sent again if it ends before its client can leave."""
    for _ in range(MAX_ROUNDS):
        finished, aborted = small_server.num_finished(), small_server.num_finished(reason="abort")
        async with _client(small_server, max_tokens=1900, n=MAX_RUNNING) as (reader, _):
            await reader.readuntil(b"data: ")
        await until_async(lambda n=finished: small_server.num_finished() == n + MAX_RUNNING, "both answers have ended")
        if small_server.num_finished(reason="abort") == aborted + MAX_RUNNING:
            return
    pytest.fail(f"in {MAX_ROUNDS} rounds answers were not aborted")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_ends_when_its_client_has_gone(small_server: Server, stream: bool) -> None:
    aborted = small_server.num_finished(reason="abort")
    with stopped_engines(small_server):
        async with _client(small_server, stream=stream, max_tokens=1900):
            await until_unfinished(small_server, 1)
        await until_unfinished(small_server, 0)
    await until_async(lambda: small_server.num_finished(reason="abort") == aborted + 1, "the request is aborted")


async def test_a_whole_answer_is_not_computed_for_a_client_that_closes_its_side(small_server: Server) -> None:
    async with _client(small_server, half_closes=True, stream=False, max_tokens=1900) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), HANG_S)
    assert answer.startswith(b"HTTP/1.1 400 ")
    await small_server.until_idle()
