"""How the ingress's HTTP server accepts connections: many in one turn of its event loop.

libuv, the library under uvloop, accepts one connection a turn (since its version 1.45). A burst then waits in the
kernel for thousands of turns, while the streams that have been accepted fill each turn with their tokens. Health checks
wait with it, HAProxy's own included, and it takes an ingress that does not answer them for dead.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

__all__ = ["CONNECTIONS_PER_TURN", "accept_many"]

CONNECTIONS_PER_TURN = 64  # to start a request takes half a millisecond of a core

Startup = Callable[[uvicorn.Server, list[socket.socket] | None], Awaitable[None]]


def accept_many(per_turn: int = CONNECTIONS_PER_TURN) -> None:
    """Let every HTTP server that this process starts from now on accept so many connections a turn.

    Ray Serve makes the server of an ingress, with one listening socket. Here the server gets duplicates of it, which
    share the queue of connections; the event loop looks at each of them once a turn. asyncio's own event loop accepts
    all that wait, and needs none.
    """
    startup: Any = uvicorn.Server.startup
    original: Startup = getattr(startup, "__wrapped__", startup)

    @functools.wraps(original)
    async def start(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if sockets and not isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            sockets = [*sockets, *(one.dup() for one in sockets for _ in range(per_turn - 1))]
        await original(server, sockets)

    uvicorn.Server.startup = start  # type: ignore[method-assign, assignment]
