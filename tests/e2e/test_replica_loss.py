"""A replica is killed in the middle of its streams: they go on elsewhere, and the server heals."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx

from tests.e2e.conftest import Server

BODY = {"prompt": "Tell me a long story about rivers", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


async def _streamed_text(client: httpx.AsyncClient, server: Server, *, kill: bool) -> str:
    """Read one stream, and kill its replica after a few events."""
    text, events = "", 0
    async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, text=line.removeprefix("data: ")).json()
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                events += 1
            if kill and events == 5:
                pids = await asyncio.to_thread(server.engine_pids)
                os.kill(pids[answer.headers["x-pagoda-replica"]], signal.SIGKILL)
                kill = False
    assert line == "" or line == "data: [DONE]"
    return text


async def test_a_killed_replica_costs_no_token_and_is_replaced(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        expected = await _streamed_text(client, server, kill=False)
        assert await _streamed_text(client, server, kill=True) == expected
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=BODY | {"max_tokens": 4, "prompt": f"After {i}"}) for i in range(8))
        )
        assert [answer.status_code for answer in answers] == [200] * 8
    deadline = time.monotonic() + 60
    while len(server.metric("pagoda_num_requests_running")) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    assert sum(value for (name, _), value in server.metrics().items() if name == "pagoda_request_migrations_total") >= 1
