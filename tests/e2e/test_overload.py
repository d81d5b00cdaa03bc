"""Overload: excess requests are rejected, those of low priorities first, and every request has a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MAX_RUNNING, MAX_WAITING
from tests.e2e.losses import stopped_engines, until_unfinished
from tests.e2e.server import Server
from tests.waiting import HANG_S

pytestmark = pytest.mark.long


@dataclass
class Answer:
    """The answer to a request."""

    status: int
    headers: httpx.Headers
    body: Any


async def _post(client: httpx.AsyncClient, **body: Any) -> Answer:
    answer = await client.post("/v1/completions", json={"prompt": "Once", "ignore_eos": True} | body)
    return Answer(answer.status_code, answer.headers, answer.json())


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=httpx.Limits(max_connections=200))


async def test_requests_beyond_the_queue_are_rejected_at_once(small_server: Server) -> None:
    """That is: before an accepted request can have been answered."""
    async with _client(small_server) as client:
        with stopped_engines(small_server):
            posts = [asyncio.create_task(_post(client, max_tokens=20)) for _ in range(40)]
            await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED, timeout=HANG_S)
            early = [post.result().status for post in posts if post.done()]
        answers = await asyncio.gather(*posts)
    assert set(early) == {503}
    accepted = [answer for answer in answers if answer.status == 200]
    rejected = [answer for answer in answers if answer.status != 200]
    assert len(accepted) >= MAX_RUNNING + MAX_WAITING
    for answer in rejected:
        assert (answer.status, answer.body["error"]["code"]) == (503, "overloaded"), answer.body
        assert int(answer.headers["Retry-After"]) >= 1
    await small_server.until_idle()


async def _begun(go_on: Callable[[], None], streams: AsyncExitStack, client: httpx.AsyncClient) -> AsyncIterator[str]:
    """Open a stream as long as the context in stopped engines, which go on until its first token; return its lines."""
    body = {"prompt": "Endless", "max_tokens": 1900, "ignore_eos": True, "stream": True}

    async def begin() -> AsyncIterator[str]:
        answer = await streams.enter_async_context(client.stream("POST", "/v1/completions", json=body))
        lines = answer.aiter_lines()
        async for line in lines:
            if line.startswith("data: {"):
                break
        return lines

    beginning = asyncio.create_task(begin())
    while not beginning.done():
        await asyncio.to_thread(go_on)
        await asyncio.sleep(0)
    return await beginning


async def test_low_priorities_are_rejected_to_make_room(small_server: Server) -> None:
    """The engine is stopped until it has been sent all requests, so that no running stream has ended by then."""
    async with _client(small_server) as client:
        async with AsyncExitStack() as streams:
            with stopped_engines(small_server) as go_on:
                running = [await _begun(go_on, streams, client) for _ in range(MAX_RUNNING)]  # dropped ones would close
                low = [asyncio.create_task(_post(client, max_tokens=1, priority=-1)) for _ in range(MAX_WAITING)]
                await until_unfinished(small_server, MAX_RUNNING + MAX_WAITING)
                high = asyncio.create_task(_post(client, max_tokens=1, priority=1))
                await until_unfinished(small_server, MAX_RUNNING + MAX_WAITING + 1)
            await asyncio.wait(low, return_when=asyncio.FIRST_COMPLETED)
            del running
        statuses = sorted([answer.status for answer in await asyncio.gather(*low)])
        assert (await high).status == 200
    assert statuses == [200, 200, 503]
    await small_server.until_idle()


@pytest.mark.exhaustive("waits for a minute; in CI test_dispatcher.py frees the blocks of a request at its deadline")
async def test_a_request_past_its_deadline_ends_and_frees_its_blocks(small_server: Server) -> None:
    """The engine is stopped meanwhile, so that it cannot finish in time on any machine."""
    async with _client(small_server) as client, AsyncExitStack() as streams:
        with stopped_engines(small_server) as go_on:
            lines = await _begun(go_on, streams, client)
            whole = asyncio.create_task(_post(client, max_tokens=1))
            rest = [line async for line in lines if line]
            late = await whole
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    assert rest[-1] == "data: [DONE]"
    assert (late.status, late.body["error"]["code"]) == (408, "timeout"), late.body
    await small_server.until_idle()
