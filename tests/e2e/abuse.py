"""Clients that take a server's connections and time: silent, slow, vanishing ones, and bursts of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.front.processes import OTHERS, kind_of
from benchmarks.serving.streams import StreamOutcome, open_streams
from tests.e2e.hostile import request
from tests.e2e.strange import COMPLETION, ENDPOINTS

LOOPBACK = "127.0.0.1"
MIB = 2**20


BYTE_INTERVAL_S = 1.0  # of a slow client; the limits of heads and bodies are ten times as long
SLOW_BYTES = 200


async def trickle(port: int, head: bytes, rest: bytes, *, address: str) -> int:
    """Send ``head`` at once and the rest slowly, until the server closes; return how many bytes of the rest it took.

    Raises:
        TimeoutError: the server has not closed although everything was sent.
    """
    num_sent = 0
    async with asyncio.timeout(2 * SLOW_BYTES * BYTE_INTERVAL_S):
        reader, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(address, 0))
        closed = asyncio.create_task(reader.read())
        try:
            writer.write(head)
            for byte in rest:
                with suppress(OSError):
                    writer.write(bytes([byte]))
                if (await asyncio.wait([closed], timeout=BYTE_INTERVAL_S))[0]:
                    break
                num_sent += 1
            await asyncio.wait([closed])
            closed.exception()  # a reset is an end too
        finally:
            closed.cancel()
            writer.transport.abort()
    return num_sent


async def trickles(port: int, count: int) -> int:
    """Trickle ``count`` heads and as many bodies to all endpoints, and send no body at all as often.

    Returns the largest number of bytes that a client could send before the server closed its connection.
    """
    body, paths = json.dumps(COMPLETION).encode(), [*ENDPOINTS]
    slow = []
    for number in range(count):
        path, last = paths[number % len(paths)], 1 + number % 200
        head = request("POST", path, [("X-Slow", "x" * SLOW_BYTES)], body)
        slow.append(trickle(port, b"", head, address=f"127.0.3.{last}"))
        head = request("POST", path, [("Content-Length", str(SLOW_BYTES))])
        slow += [trickle(port, head, rest, address=f"127.0.4.{last}") for rest in (b" " * SLOW_BYTES, b"")]
    return max(await asyncio.gather(*slow))


async def burst(port: int, count: int, *, address: str) -> list[StreamOutcome]:
    """Open ``count`` streams at once, each with a prompt of its own, and read them to their ends."""
    bodies: Sequence[dict[str, Any]] = [
        {"prompt": f"Stream {number} of a burst says", "max_tokens": 16, "ignore_eos": True} for number in range(count)
    ]
    return await open_streams(port, bodies, address=address)


def memory(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Return the MiB that each process which still runs has for itself, by its id."""
    sizes = {}
    for process in processes:
        with suppress(psutil.Error):
            sizes[process.pid] = process.memory_full_info().uss / MIB
    return sizes


def names(processes: Sequence[psutil.Process]) -> dict[int, str]:
    """Return what each process is: ingress, engine, haproxy, or its program."""
    kinds = {}
    for process in processes:
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            kind = kind_of(command)
            kinds[process.pid] = command.split(" ", 1)[0].rpartition("/")[2] if kind == OTHERS else kind
    return kinds
