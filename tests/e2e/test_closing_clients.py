"""Clients that close their side of the connection, or all of it, while a stream waits or runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.e2e.conftest import MAX_RUNNING, MAX_WAITING
from tests.e2e.hostile import request
from tests.e2e.server import Server
from tests.waiting import HANG_S, until_async

pytestmark = pytest.mark.long

COMMENT = b":\n\n"
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


async def _until(server: Server, **expected: int) -> None:
    """Wait for numbers of running and waiting requests."""
    await until_async(lambda: expected.items() <= server.usage().items(), f"{expected} requests", details=server.usage)


@asynccontextmanager
async def _busy(server: Server) -> AsyncIterator[None]:
    """Fill all slots of running requests, and all but one of waiting requests, with long answers."""
    long = {"max_tokens": 1900, "n": MAX_RUNNING}
    async with _client(server, **long) as (first, _):
        await first.readuntil(b"data: ")
        async with _client(server, **long):  # only now, for either of two that come at once may be the first
            await _until(server, running=MAX_RUNNING, waiting=MAX_WAITING - 1)
            yield
    await _until(server, running=0, waiting=0)


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
    async with _busy(small_server):
        client = _client(small_server, half_closes=True, max_tokens=20, return_token_ids=True)
        reader, _ = await client.__aenter__()
        before = await asyncio.wait_for(reader.readuntil(COMMENT), HANG_S)
        assert before.startswith(b"HTTP/1.1 200 ")
        assert b"data: " not in before
    answer = await asyncio.wait_for(reader.read(), HANG_S)
    await client.__aexit__(None, None, None)
    assert _tokens(answer) == 20
    assert b"data: [DONE]" in answer


async def test_a_stream_ends_when_its_client_has_gone(small_server: Server) -> None:
    finished, aborted = small_server.num_finished(), small_server.num_finished(reason="abort")
    async with _client(small_server, max_tokens=1900, n=MAX_RUNNING) as (reader, _):
        await reader.readuntil(b"data: ")
    await until_async(lambda: small_server.num_finished() == finished + MAX_RUNNING, "both answers have ended")
    assert small_server.num_finished(reason="abort") == aborted + MAX_RUNNING


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_ends_when_its_client_has_gone(small_server: Server, stream: bool) -> None:
    async with _busy(small_server):
        aborted = small_server.num_finished(reason="abort")
        async with _client(small_server, stream=stream, max_tokens=20):
            await _until(small_server, waiting=MAX_WAITING)
        await until_async(lambda: small_server.num_finished(reason="abort") == aborted + 1, "the request is aborted")


async def test_a_whole_answer_is_not_computed_for_a_client_that_closes_its_side(small_server: Server) -> None:
    async with _client(small_server, half_closes=True, stream=False, max_tokens=1900) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), HANG_S)
    assert answer.startswith(b"HTTP/1.1 400 ")
    await _until(small_server, running=0)
