"""Many clients in one process that does little for each, so that the server gets the machine's cores.

Every stream, probe and idle client has a connection of its own. Of a stream nothing is parsed but the status, the first
token and the end.
"""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from time import perf_counter
from typing import Any

from benchmarks.serving.pauses import Pauses

__all__ = ["Reply", "StreamOutcome", "idle_connections", "open_streams", "probing", "send"]

TIMEOUT_S = 240.0
LOOPBACK = "127.0.0.1"
PROBE_INTERVAL_S = 0.05
RECEIVED_BYTES = 2**16


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


class _Stream:
    """One connection: sends the request and notes when what came."""

    def __init__(self, request: bytes, port: int, address: str) -> None:
        self.outcome = StreamOutcome()
        self.socket = socket.socket()
        self._request = request
        self._tail = b""  # of what came: an event may come in parts
        self._started = perf_counter()
        self.socket.setblocking(False)
        self.socket.bind((address, 0))
        self.socket.connect_ex((LOOPBACK, port))  # an error ends the first receive

    def send(self) -> None:
        """Send the request, which fits the empty buffer of a new connection."""
        self.socket.send(self._request)

    def receive(self) -> bool:
        """Note what came; returns whether more is to come."""
        data = self.socket.recv(RECEIVED_BYTES)
        outcome, seen = self.outcome, self._tail + data
        if not outcome.status and len(seen) >= len("HTTP/1.1 200"):
            outcome.status = int(seen[9:12])
        if not outcome.first_token_s and b"\ndata: {" in seen:
            outcome.first_token_s = perf_counter() - self._started
        self._tail = seen if not outcome.status else seen[-16:]
        outcome.is_complete = b"data: [DONE]" in seen
        return bool(data) and not outcome.is_complete

    def end(self) -> None:
        """Close the connection and note the end."""
        self.socket.close()
        self.outcome.total_s = perf_counter() - self._started


class _Streams:
    """Many streams that one thread polls."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._open: dict[int, _Stream] = {}  # by file descriptor

    def run(self, port: int, requests: Sequence[bytes], address: str) -> list[StreamOutcome]:
        """Send all requests at once, and read their streams to the end; raises TimeoutError after four minutes."""
        deadline = perf_counter() + TIMEOUT_S
        outcomes: list[StreamOutcome] = []
        try:
            for request in requests:
                stream = _Stream(request, port, address)
                self._open[stream.socket.fileno()] = stream
                self._poll.register(stream.socket, select.EPOLLIN | select.EPOLLOUT)
                outcomes.append(stream.outcome)
                self._handle_events(0.0)
            while self._open:
                if perf_counter() > deadline:
                    raise TimeoutError(f"{len(self._open)} streams have not ended after {TIMEOUT_S:g} s")
                self._handle_events(1.0)
        finally:
            for stream in self._open.values():
                stream.end()
            self._poll.close()
        return outcomes

    def _handle_events(self, timeout_s: float) -> None:
        for descriptor, events in self._poll.poll(timeout_s):
            stream, goes_on = self._open[descriptor], False
            with suppress(OSError):
                if events & select.EPOLLOUT:
                    stream.send()
                    self._poll.modify(descriptor, select.EPOLLIN)
                goes_on = stream.receive() if events & ~select.EPOLLOUT else True
            if not goes_on:
                del self._open[descriptor]
                stream.end()


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
    return await asyncio.to_thread(_Streams().run, port, [_request(body) for body in bodies], address)


@contextmanager
def idle_connections(port: int, count: int, *, address: str = LOOPBACK) -> Iterator[list[socket.socket]]:
    """Hold connections that send nothing while the block runs; some may be closed by the server at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opening = socket.socket()
            opened.append(opening)
            opening.bind((address, 0))
            with suppress(OSError):
                opening.connect((LOOPBACK, port))
        yield opened
    finally:
        for item in opened:
            item.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """The status of an answer, 0 if none came, and the seconds until its end; the connection is a new one."""

    status: int
    seconds: float
    started: float  # of perf_counter

    def seconds_without(self, pauses: Pauses) -> float:
        """Return the seconds in which the machine did not pause."""
        return self.seconds - pauses.within(self.started, self.started + self.seconds)


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
    return Reply(status, perf_counter() - started, started)


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
