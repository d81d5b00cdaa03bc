"""Many concurrent clients, some of which disconnect: the others are unaffected, and all blocks are freed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.e2e.server import Server, by_replica
from tests.waiting import HANG_S, until_async

CLIENTS, DISCONNECTING, TOKENS, UNREAD_TOKENS = 64, 16, 96, 1500
MAX_ROUNDS = 5
FINISHED = "pagoda_requests_finished_total"


async def _stream(client: httpx.AsyncClient, number: int, max_chunks: int | None) -> tuple[int, str | None]:
    """Read a stream to its end or disconnect after some chunks; return (tokens, finish reason)."""
    body = {"prompt": f"Client {number} says", "ignore_eos": True, "stream": True, "return_token_ids": True}
    body["max_tokens"] = TOKENS if max_chunks is None else UNREAD_TOKENS
    tokens, reason, chunks = 0, None, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            tokens, reason, chunks = tokens + len(choice["token_ids"]), choice["finish_reason"], chunks + 1
            if chunks == max_chunks:
                return tokens, reason
    return tokens, reason


async def _all(server: Server) -> list[tuple[int, str | None]]:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as client:
        return await asyncio.gather(
            *(_stream(client, number, 3 if number < DISCONNECTING else None) for number in range(CLIENTS))
        )


async def test_64_streams_of_which_16_disconnect(server: Server) -> None:
    """More than one round is needed only if answers end before their client gets to read three events."""
    aborted = 0.0
    await server.until_idle()
    for _ in range(MAX_ROUNDS):
        all_before, aborted_before = server.num_finished(), server.num_finished(reason="abort")
        seen = await _all(server)
        assert all(tokens == TOKENS and reason == "length" for tokens, reason in seen[DISCONNECTING:])
        await _until_finished(server, all_before + CLIENTS)
        aborted += server.num_finished(reason="abort") - aborted_before
        await server.until_idle()
        if aborted >= DISCONNECTING:
            return
    pytest.fail(f"only {aborted:g} requests were aborted in {MAX_ROUNDS} rounds")


async def _until_finished(server: Server, number: float) -> None:
    await until_async(lambda: server.num_finished() == number, f"{number:g} requests have finished")


async def test_a_request_without_streaming_is_aborted_on_disconnect(server: Server) -> None:
    """It is sent again if it ends before its client can leave."""
    body = {"prompt": "Leave early", "max_tokens": UNREAD_TOKENS, "ignore_eos": True}
    await server.until_idle()
    aborted = server.num_finished(reason="abort")
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
        for _ in range(MAX_ROUNDS):
            finished = server.num_finished()
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await until_async(lambda call=call: call.done() or server.usage()["running"], "the request runs")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await _until_finished(server, finished + 1)
            if server.num_finished(reason="abort") > aborted:
                break
    assert server.num_finished(reason="abort") == aborted + 1
    await server.until_idle()


async def test_metrics_agree_with_the_running_requests(server: Server) -> None:
    """The metrics of an engine change one after the other, so they are read until they agree."""
    for _ in range(MAX_ROUNDS):
        if await _metrics_agree(server):
            return
    pytest.fail("all streams ended before the metrics were read")


async def _metrics_agree(server: Server) -> bool:
    """Open streams, and wait until the metrics say so; False if all streams have ended by then."""
    body = {"max_tokens": UNREAD_TOKENS, "ignore_eos": True, "stream": True}
    await server.until_idle()
    before = by_replica(server.metrics_of_all(), FINISHED)
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client, AsyncExitStack() as streams:
        prompts = [f"Run {number} of several, all alone" for number in range(6)]
        opened = [client.stream("POST", "/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts]
        answers = await asyncio.gather(*(streams.enter_async_context(stream) for stream in opened))
        sent = Counter(answer.headers["x-pagoda-replica"] for answer in answers)

        def num_running() -> list[float]:
            """Return the number of running requests; nothing while the metrics disagree."""
            samples = server.metrics_of_all()
            running = by_replica(samples, "pagoda_num_requests_running")
            finished, used = by_replica(samples, FINISHED), by_replica(samples, "pagoda_kv_blocks", state="used")
            usage = by_replica(samples, "pagoda_kv_cache_usage_ratio")
            agree = all(
                running[name] + finished[name] - before[name] == number
                and used[name] >= running[name]
                and (0 < usage[name] < 1) == (running[name] > 0)
                for name, number in sent.items()
            )
            return [sum(running.values())] if agree else []

        [running] = await until_async(num_running, "the metrics agree with the streams")
    await server.until_idle()
    return running > 0
