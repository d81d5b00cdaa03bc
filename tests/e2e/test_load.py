"""Many concurrent clients, some of which disconnect: the others are unaffected, and all blocks are freed."""

from __future__ import annotations

import asyncio
import json

import httpx

from tests.e2e.server import Server, by_replica
from tests.waiting import HANG_S, until_async

CLIENTS, DISCONNECTING, TOKENS, UNREAD_TOKENS = 64, 16, 96, 1500


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


def _in_use(server: Server) -> dict[str, float]:
    return {
        "running": server.total("pagoda_num_requests_running"),
        "waiting": server.total("pagoda_num_requests_waiting"),
        "blocks": server.total("pagoda_kv_blocks", state="used"),
    }


async def _until_idle(server: Server) -> None:
    await until_async(lambda: not any(_in_use(server).values()), "nothing is in use", details=lambda: _in_use(server))


def _aborted(server: Server) -> float:
    """Return how many requests have been aborted so far."""
    return server.total("pagoda_requests_finished_total", reason="abort")


async def test_64_streams_of_which_16_disconnect(server: Server) -> None:
    before = _aborted(server)
    seen = await _all(server)
    assert all(tokens == TOKENS and reason == "length" for tokens, reason in seen[DISCONNECTING:])
    assert all(tokens < UNREAD_TOKENS and reason is None for tokens, reason in seen[:DISCONNECTING])
    await _until_idle(server)
    assert _aborted(server) == before + DISCONNECTING


async def test_a_request_without_streaming_is_aborted_on_disconnect(server: Server) -> None:
    before = _aborted(server)
    body = {"prompt": "Leave early", "max_tokens": 1500, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body, timeout=HANG_S))
        await until_async(lambda: _in_use(server)["running"], "the request runs")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await _until_idle(server)
    assert _aborted(server) == before + 1


async def test_metrics_agree_with_the_running_requests(server: Server) -> None:
    body = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    before = server.metric("pagoda_requests_finished_total")
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
        streams = [
            client.stream("POST", "/v1/completions", json=body | {"prompt": f"Run {number} of several, all alone"})
            for number in range(6)
        ]
        answers = await asyncio.gather(*(stream.__aenter__() for stream in streams))
        sent = {answer.headers["x-pagoda-replica"] for answer in answers}
        samples = server.metrics()  # at one time: the streams may end between two
        running = by_replica(samples, "pagoda_num_requests_running")
        finished = by_replica(samples, "pagoda_requests_finished_total")
        used = by_replica(samples, "pagoda_kv_blocks", state="used")
        usage = by_replica(samples, "pagoda_kv_cache_usage_ratio")
        for stream in streams:
            await stream.__aexit__(None, None, None)
    for replica in sent:
        ended = finished.get(replica, 0.0) - before.get(replica, 0.0)  # on a slow machine, before the metrics are read
        assert running[replica] + ended == sum(answer.headers["x-pagoda-replica"] == replica for answer in answers)
        assert used[replica] >= running[replica]
        assert (0 < usage[replica] < 1) == (running[replica] > 0)
    await _until_idle(server)
