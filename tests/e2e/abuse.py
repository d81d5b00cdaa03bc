"""Clients that take a server's connections and time: silent, slow, vanishing ones, and bursts of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import psutil

from benchmarks.front.processes import OTHERS, kind_of
from benchmarks.serving.streams import StreamOutcome, open_streams
from tests.e2e.hostile import request
from tests.e2e.strange import COMPLETION, ENDPOINTS

LOOPBACK = "127.0.0.1"
MIB = 2**20


async def trickle(port: int, head: bytes, rest: bytes, *, address: str) -> float:
    """Send ``head`` at once and a byte of the rest a second; return after how many seconds the server closes.

    Raises:
        TimeoutError: if it has not after a minute.
    """
    started = monotonic()
    async with asyncio.timeout(60.0):
        reader, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(address, 0))
        closed = asyncio.create_task(reader.read())
        try:
            writer.write(head)
            for byte in rest:
                with suppress(OSError):
                    writer.write(bytes([byte]))
                if (await asyncio.wait([closed], timeout=1.0))[0]:
                    break
            await asyncio.wait([closed])
            closed.exception()  # a reset is an end too
        finally:
            closed.cancel()
            writer.transport.abort()
    return monotonic() - started


async def trickles(port: int, count: int) -> float:
    """Trickle so many heads and bodies at all endpoints, and be silent instead of as many bodies.

    Returns the longest time until the server closed a connection.
    """
    body, paths = json.dumps(COMPLETION).encode(), [*ENDPOINTS]
    slow = []
    for number in range(count):
        path, last = paths[number % len(paths)], 1 + number % 200
        head = request("POST", path, [("X-Slow", "x" * 200)], body)
        slow.append(trickle(port, b"", head, address=f"127.0.3.{last}"))
        head = request("POST", path, [("Content-Length", "200")])
        slow += [trickle(port, head, rest, address=f"127.0.4.{last}") for rest in (b" " * 200, b"")]
    return max(await asyncio.gather(*slow))


async def burst(port: int, count: int, *, address: str) -> list[StreamOutcome]:
    """Open so many streams at once, each with a prompt of its own, and read them to their ends."""
    bodies: Sequence[dict[str, Any]] = [
        {"prompt": f"Stream {number} of a burst says", "max_tokens": 16, "ignore_eos": True} for number in range(count)
    ]
    return await open_streams(port, bodies, address=address)


def memory(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Return the MiB that each process which still runs has for itself, by its id."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            found[process.pid] = process.memory_full_info().uss / MIB
    return found


def names(processes: Sequence[psutil.Process]) -> dict[int, str]:
    """Return what each process is: ingress, engine, haproxy, or its program."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            kind = kind_of(command)
            found[process.pid] = command.split(" ", 1)[0].rpartition("/")[2] if kind == OTHERS else kind
    return found
