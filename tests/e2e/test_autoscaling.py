"""A deployment that scales to zero engines when it is idle, and starts one for a request; then it is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from deployments.launcher.dashboard import delete_applications
from tests.e2e.load import Answer, Question, ask, new_client
from tests.e2e.losses import num_unfinished, stopped_engines, until_unfinished
from tests.e2e.server import Server, running_server
from tests.waiting import HANG_S, until, until_async

pytestmark = pytest.mark.long

STREAMS, TOKENS = 4, 1900


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with zero to two engines that removes idle ones after two seconds, and waits long for stopped ones."""

    def change(args: dict[str, Any]) -> None:
        args["replicas"] |= {"num_engine_replicas": 1, "cpus_per_engine": 0.1}
        args["autoscaling"] |= {"max_replicas": 2, "min_replicas": 0, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
        args["limits"]["stall_timeout_s"] = 600

    with running_server(tmp_path_factory.mktemp("scaled"), change) as running:
        yield running


def test_to_zero_and_back(scaled: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=scaled.url, timeout=HANG_S) as client:
        first = client.post("/v1/completions", json=body).raise_for_status().json()
        until(lambda: not scaled.pids("engine"), "no engine is left")
        assert client.get("/health").json() == {"status": "idle"}
        again = client.post("/v1/completions", json=body).raise_for_status()
    assert again.json()["choices"] == first["choices"]
    assert again.headers["x-pagoda-replica"]


@pytest.mark.exhaustive("in CI a stop signal deletes the applications while a stream runs, in test_launcher.py")
async def test_deleting_the_applications_lets_streams_finish(scaled: Server) -> None:
    """This is how to drain a server; `serve shutdown` ends the proxy and with it every stream at once.

    The engine is stopped from the beginning of one stream until the ingress drains, so no stream can have ended before.
    """
    async with new_client(scaled) as client:
        async with _stopped_in_mid_stream(scaled, client) as first:
            streams = [first, *(asyncio.create_task(ask(client, _tale(number))) for number in range(1, STREAMS))]
            await until_unfinished(scaled, STREAMS)
            assert await asyncio.to_thread(delete_applications, scaled.dashboard)
            await until_async(lambda: not scaled.pids("ingress"), "the ingress drains")
            assert not any(stream.done() for stream in streams)
        answers = await asyncio.gather(*streams)
    assert [len(answer.token_ids[0]) for answer in answers] == [TOKENS] * STREAMS


@asynccontextmanager
async def _stopped_in_mid_stream(server: Server, client: httpx.AsyncClient) -> AsyncIterator[asyncio.Task[Answer]]:
    """Open a stream, for which an engine starts if none runs, and stop the engine in its middle; yields the stream."""
    while True:
        has_started = asyncio.Event()

        async def start(response: httpx.Response, number: int, has_started: asyncio.Event = has_started) -> None:
            has_started.set()

        stream = asyncio.create_task(ask(client, _tale(0), on_chunk=start))
        await asyncio.wait_for(has_started.wait(), HANG_S)
        with stopped_engines(server):
            if await asyncio.to_thread(num_unfinished, server):
                yield stream
                return
        await stream  # the engine was faster than this test


def _tale(number: int) -> Question:
    body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return Question("/v1/completions", body | {"prompt": f"Tale {number}"})
