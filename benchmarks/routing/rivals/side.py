"""The rival's side: answers the simulation's messages with the decisions of a router, in the rival's environment.

It imports only the standard library. A module for each kind of router implements ``Router`` and calls ``main``.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["Cluster", "Events", "Placement", "Request", "Router", "main"]

MAX_LINE = 1 << 26  # bytes of a message
Hashes = Sequence[int]


class Request(NamedTuple):
    """A request of the trace."""

    job: int
    input_tokens: int
    output_tokens: int
    hashes: Hashes  # of its full blocks


class Events(NamedTuple):
    """What one step of a replica stored and removed."""

    replica: int
    stored: Hashes  # a chain; its first block's parent is cached
    removed: Hashes


class Placement(NamedTuple):
    """A decision."""

    job: int
    replica: str
    cached_blocks: int | None = None  # that the router expects there, if it says so


@dataclass
class Cluster:
    """The simulated replicas."""

    replicas: list[str]
    block_size: int
    cache_blocks: int  # of each replica
    loads: list[dict[str, float]] = field(default_factory=list)  # as of the last message, by replica


class Router(Protocol):
    """A router and what it talks to. Each of the three methods returns the requests that are placed by then."""

    reads: tuple[str, ...]  # what it wants with the messages: events, loads
    version: str

    async def choose(self, request: Request, events: Sequence[Events]) -> list[Placement]:
        """Apply the events, then send a request."""

    async def first_token(self, job: int) -> list[Placement]:
        """Send the first token of an answer."""

    async def completed(self, job: int) -> list[Placement]:
        """End an answer."""

    async def finish(self, events: Sequence[Events], cached: list[tuple[Hashes, list[int]]]) -> dict[str, Any]:
        """Return a report on the run. ``cached``: prompts, and how many blocks of them each replica has."""

    async def close(self) -> None:
        """End the router."""


class Pace:
    """Simulated seconds per second, at most: for routers with timers of their own."""

    def __init__(self, pace: float | None) -> None:
        self.pace, self.started, self.lost_s = pace, time.perf_counter(), 0.0

    async def wait(self, now: float) -> None:
        """Wait until a simulated time. Time that was lost is not caught up, which would exceed the pace."""
        if self.pace is None:
            return
        delay = self.started + now / self.pace - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        else:
            self.started -= delay
            self.lost_s -= delay


Make = Callable[[Cluster, dict[str, Any]], Any]  # to an awaitable Router


def main(make: Make) -> None:
    """Serve on the socket whose number is the last argument, until its other end closes."""
    asyncio.run(_serve(make, socket.socket(fileno=int(sys.argv[-1]))))


async def _serve(make: Make, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
    session = _Session(make)
    try:
        while line := await reader.readline():
            try:
                reply = await session.answer(json.loads(line))
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}", "is_timeout": isinstance(error, TimeoutError)}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
    except ConnectionError:
        pass  # the simulation has ended
    finally:
        if session.router is not None:
            await session.router.close()
        sys.stdout.flush()
        os._exit(0)  # threads of the rival's library do not end by themselves


class _Session:
    """One run."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.router: Router | None = None

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a message."""
        if message["do"] == "start":
            return await self._start(message)
        router, events = self.router, [Events(*event) for event in message.get("events", ())]
        assert router is not None
        if message["do"] == "finish":
            report = await router.finish(events, message.get("cached", []))
            return {"report": report | ({"lost_s": round(self.pace.lost_s, 1)} if self.pace.pace else {})}
        self.cluster.loads = message["loads"] or []
        await self.pace.wait(message["now"])
        if message["do"] == "choose":
            request = Request(message["job"], message["input"], message["output"], message["hashes"])
            return {"placed": await router.choose(request, events)}
        step = router.first_token if message["do"] == "first_token" else router.completed
        return {"placed": await step(message["job"])}

    async def _start(self, message: dict[str, Any]) -> dict[str, Any]:
        options = message["options"]
        self.cluster = Cluster(message["replicas"], message["block_size"], message["cache_blocks"])
        self.router = router = await self.make(self.cluster, options)
        self.pace = Pace(options.get("pace"))
        return {"reads": router.reads, "version": router.version}
