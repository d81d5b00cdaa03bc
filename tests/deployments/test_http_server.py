"""The ingress's HTTP server, on Ray's event loop: how many connections it accepts in one turn."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from deployments.http_server import accept_many

uvloop = pytest.importorskip("uvloop", reason="Ray uses asyncio's event loop here")

CLIENTS = 40


@pytest.fixture(autouse=True)
def _uvicorn_as_it_is() -> Iterator[None]:
    startup: Any = uvicorn.Server.startup
    uvicorn.Server.startup = getattr(startup, "__wrapped__", startup)  # an ingress of an earlier test has changed it
    yield
    uvicorn.Server.startup = startup  # type: ignore[method-assign]


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def _most_accepted_in_a_turn() -> tuple[int, int]:
    """Let clients connect before the server looks; return the most that a turn accepted, and how many in all."""
    listening, clients = socket.socket(), list[socket.socket]()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_app, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS)]
    counts = [0]
    for _ in range(3 * CLIENTS):
        await asyncio.sleep(0)
        counts.append(len(server.server_state.connections))
    for client in clients:
        client.close()
    server.should_exit = True
    with suppress(asyncio.CancelledError):
        await serving
    return max(after - before for before, after in itertools.pairwise(counts)), counts[-1]


def _run() -> tuple[int, int]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_most_accepted_in_a_turn())


def test_one_connection_a_turn_is_what_the_event_loop_does() -> None:
    """If this fails, accept_many is no longer needed."""
    assert _run() == (1, CLIENTS)


@pytest.mark.parametrize("times", [1, 2])
def test_several_connections_are_accepted_in_a_turn(times: int) -> None:
    for _ in range(times):  # the second call replaces the first
        accept_many(8)
    assert _run() == (8, CLIENTS)


def test_asyncios_own_event_loop_is_left_alone() -> None:
    accept_many(8)
    most, accepted = asyncio.run(_most_accepted_in_a_turn())
    assert (most, accepted) == (CLIENTS, CLIENTS)
