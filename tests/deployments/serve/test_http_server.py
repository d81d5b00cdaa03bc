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

from deployments.proxy.client_rules import CLIENT_HEADER
from deployments.serve.http_server import StartInTurns, accept_many
from tests.waiting import until_in_loop

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
    await until_in_loop(lambda: server.started, "the server has started")
    clients = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS)]
    counts = [0]

    def all_are_accepted() -> bool:
        counts.append(len(server.server_state.connections))
        return counts[-1] == CLIENTS

    await until_in_loop(all_are_accepted, "all connections are accepted", pause_s=0)  # is called once a turn
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


async def _turns_of_requests(methods: list[str], clients: list[str]) -> list[int]:
    """Return in which turn of the event loop each of the requests that arrive at once starts."""
    turns, started = [0], [0] * len(methods)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started[scope["number"]] = turns[0]

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    gate, counting = StartInTurns(app, 3), asyncio.create_task(count())
    scopes = [
        {"type": "http", "method": method, "headers": [(CLIENT_HEADER.encode(), client.encode())], "number": number}
        for number, (method, client) in enumerate(zip(methods, clients, strict=True))
    ]
    await asyncio.gather(*(gate(scope, None, None) for scope in scopes))  # type: ignore[arg-type]
    counting.cancel()
    return started


async def test_few_requests_with_a_body_start_in_a_turn() -> None:
    turns = await _turns_of_requests(["POST"] * 12, ["a"] * 12)
    assert turns == sorted(turns)
    assert max(turns.count(turn) for turn in turns) == 3


async def test_health_checks_and_other_clients_do_not_wait_for_the_end_of_a_burst() -> None:
    turns = await _turns_of_requests([*["POST"] * 30, "GET", "POST"], [*["a"] * 31, "b"])
    assert turns[30] == turns[0]
    assert turns[31] < turns[10]


def test_the_requests_of_every_server_start_in_turns() -> None:
    async def run() -> uvicorn.Server:
        server = uvicorn.Server(uvicorn.Config(_app, lifespan="off", log_config=None, port=0))
        serving = asyncio.create_task(server.serve())
        await until_in_loop(lambda: server.started, "the server has started")
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving
        return server

    accept_many()
    assert isinstance(asyncio.run(run()).config.loaded_app, StartInTurns)


async def _sized(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"abc"})


async def _streamed(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for body in (b"data: a\n\n", b"", b"data: b\n\n"):
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body"})


async def _answer(app: Any, request: bytes) -> tuple[bytes, bytes]:
    """Return the head and the body of the answer of a server that ``accept_many`` has changed."""
    accept_many(1)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await until_in_loop(lambda: server.started, "the server has started")
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end of the connection
    writer.close()
    server.should_exit = True
    with suppress(asyncio.CancelledError):
        await serving
    return head.lower(), body


@pytest.mark.parametrize(
    ("app", "method", "body"),
    [
        (_streamed, "GET", b"data: a\n\ndata: b\n\n"),
        (_sized, "GET", b"abc"),
        (_streamed, "HEAD", b""),
        (_sized, "HEAD", b""),
        (_app, "GET", b""),
    ],
)
async def test_http_1_0_gets_no_chunks(app: Any, method: str, body: bytes) -> None:
    head, received = await _answer(app, f"{method} / HTTP/1.0\r\n\r\n".encode())
    assert received == body
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (b"content-length: 3" in head) == (app is _sized)


async def test_http_1_1_gets_chunks() -> None:
    head, received = await _answer(_streamed, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert received == b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
