"""How the ingress's HTTP server takes a burst: it accepts many connections in a turn, and starts few requests.

libuv, the library under uvloop, accepts one connection a turn (since its version 1.45). A burst then waits in the
kernel for thousands of turns, while the streams that have been accepted fill each turn with their tokens. Health checks
wait with it, HAProxy's own included, and it takes an ingress that does not answer them for dead.

Requests start in turns because Serve does a quarter of a request's work before our application sees it. If it did that
for all requests that have arrived, the first of them would reach an engine only after the last one was begun.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.turns import REQUESTS_PER_TURN, Turns
from deployments.proxy.client_rules import CLIENT_HEADER

__all__ = ["CONNECTIONS_PER_TURN", "StartInTurns", "UntilClosed", "accept_many"]

CONNECTIONS_PER_TURN = 64
_CLIENT_HEADER = CLIENT_HEADER.encode()

Startup = Callable[[uvicorn.Server, list[socket.socket] | None], Awaitable[None]]


def accept_many(per_turn: int = CONNECTIONS_PER_TURN) -> None:
    """Let every HTTP server that this process starts from now on accept up to ``per_turn`` connections a turn.

    Its requests start in turns, and those of HTTP/1.0 get no chunks.

    Ray Serve makes the server of an ingress, with one listening socket. Here the server gets duplicates of it, which
    share the queue of connections; the event loop looks at each of them once a turn. asyncio's own event loop accepts
    all that wait, and needs none.
    """
    startup: Any = uvicorn.Server.startup
    original: Startup = getattr(startup, "__wrapped__", startup)

    @functools.wraps(original)
    async def start(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if sockets and not isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            sockets = [*sockets, *(listener.dup() for listener in sockets for _ in range(per_turn - 1))]
        server.config.loaded_app = StartInTurns(UntilClosed(server.config.loaded_app))
        await original(server, sockets)

    uvicorn.Server.startup = start  # type: ignore[method-assign, assignment]


class UntilClosed:
    """An ASGI application that answers HTTP/1.0 without chunks, which it does not have (RFC 9112, 6.1).

    uvicorn sends chunks to every client if it is not told the length. Here the end of the connection, which uvicorn
    closes after an answer to HTTP/1.0, is the end of the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "http" and scope["http_version"] == "1.0":
            send = _without_chunks(send)
        await self._app(scope, receive, send)


def _without_chunks(send: Send) -> Send:
    cycle: Any = getattr(send, "__self__", None)  # uvicorn's request and response
    if not hasattr(cycle, "chunked_encoding") or not hasattr(cycle, "expected_content_length"):
        return send  # of another server, or of a test
    has_length = False

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


class StartInTurns:
    """An ASGI application whose POST requests start in turns; the others, health checks too, start at once."""

    def __init__(self, app: ASGIApp, per_turn: int = REQUESTS_PER_TURN) -> None:
        self._app = app
        self._turns = Turns(per_turn)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "http" and scope["method"] == "POST":
            client = next((value for name, value in scope["headers"] if name == _CLIENT_HEADER), b"")
            await self._turns.wait(client.decode("latin-1"))
        await self._app(scope, receive, send)
