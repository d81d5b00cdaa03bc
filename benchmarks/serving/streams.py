"""Many clients in one process that does little for each, so that the server gets the machine's cores.

Every stream, probe and idle client has a connection of its own. Of a stream nothing is parsed but the status, the first
token and the end.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from time import perf_counter
from typing import Any

__all__ = ["Reply", "StreamOutcome", "idle_connections", "open_streams", "probing", "send"]

TIMEOUT_S = 240.0
LOOPBACK = "127.0.0.1"
PROBE_INTERVAL_S = 0.05


@dataclass(slots=True)
class StreamOutcome:
    """Times are seconds after the client began to connect.

    Attributes:
        status: of HTTP; 0 if the connection ended without one.
        first_token_s: 0 if no token came.
        total_s: until the connection was closed.
        is_complete: the stream's last event has come.
    """

    status: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    is_complete: bool = False


class _Stream(asyncio.Protocol):
    """One connection: sends the request and notes when what came."""

    def __init__(self, request: bytes) -> None:
        self.outcome = StreamOutcome()
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._started = perf_counter()
        self._tail = b""  # of what came: an event may come in parts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        outcome, seen = self.outcome, self._tail + data
        if not outcome.status and len(seen) >= len("HTTP/1.1 200"):
            outcome.status = int(seen[9:12])
        if not outcome.first_token_s and b"\ndata: {" in seen:
            outcome.first_token_s = perf_counter() - self._started
        self._tail = seen if not outcome.status else seen[-16:]
        if b"data: [DONE]" in seen:
            outcome.is_complete = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        """Note the end of the connection."""
        self.outcome.total_s = perf_counter() - self._started
        if not self.ended.done():
            self.ended.set_result(None)


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: pagoda\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def open_streams(port: int, bodies: Sequence[dict[str, Any]], *, address: str = LOOPBACK) -> list[StreamOutcome]:
    """Send all completion requests at once, and read their streams to the end.

    Args:
        port: of a server on this machine.
        bodies: of the requests.
        address: from which to connect; on Linux any of 127.0.0.0/8.

    Raises:
        TimeoutError: if the streams have not ended after four minutes.
    """
    loop = asyncio.get_running_loop()

    async def stream(request: bytes) -> StreamOutcome:
        one = _Stream(request)
        try:
            await loop.create_connection(lambda: one, LOOPBACK, port, local_addr=(address, 0))
        except OSError:
            one.end()
        await one.ended
        return one.outcome

    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*(stream(_request(body)) for body in bodies))


@contextmanager
def idle_connections(port: int, count: int, *, address: str = LOOPBACK) -> Iterator[list[socket.socket]]:
    """Hold connections that send nothing while the block runs; some may be closed by the server at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            opened.append(one)
            one.bind((address, 0))
            with suppress(OSError):
                one.connect((LOOPBACK, port))
        yield opened
    finally:
        for one in opened:
            one.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """The status of an answer, 0 if none came, and the seconds until its end; the connection is a new one."""

    status: int
    seconds: float


def send(port: int, path: str, *, address: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Reply:
    """GET a path, or POST a body to it."""
    started, status = perf_counter(), 0
    connection = HTTPConnection(LOOPBACK, port, timeout=timeout_s, source_address=(address, 0))
    with suppress(OSError, HTTPException):
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    connection.close()
    return Reply(status, perf_counter() - started)


@contextmanager
def probing(port: int, paths: Sequence[str], *, address: str) -> Iterator[dict[str, list[Reply]]]:
    """Probe each path again and again, in a thread of its own, while the block runs; yields the replies."""
    replies: dict[str, list[Reply]] = {path: [] for path in paths}
    has_ended = threading.Event()

    def probe(path: str) -> None:
        while not has_ended.wait(PROBE_INTERVAL_S):
            replies[path].append(send(port, path, address=address))

    threads = [threading.Thread(target=probe, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    try:
        yield replies
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()
