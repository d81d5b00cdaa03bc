"""HttpTarget: sends requests to one server over kept connections and returns what came of each."""

from __future__ import annotations

import asyncio
import json
import ssl
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from deployments.cli.bench.sse import SseReader
from deployments.cli.client import base_url
from deployments.launcher.direct import host_in_url

__all__ = ["HttpTarget", "Outcome"]

RECEIVE_BYTES = 2**16


@dataclass(slots=True)
class Outcome:
    """What one request has brought. Times are seconds of ``perf_counter``.

    Attributes:
        error: empty, an HTTP status, the code of an error in the stream, or the name of a failure of the connection.
        arrivals: of the events with tokens.
        token_ids: of the answer, if the server sends them.
        late_s: how much later it was sent than scheduled; None: it was sent when a client was free.
    """

    sent_at: float
    ended_at: float
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    late_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first one; None for one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class _Connection(asyncio.BufferedProtocol):
    """One connection, with at most one request at a time.

    Args:
        buffer: into which all connections of a loop receive. Without one, asyncio allocates 256 KiB at each read, which
            takes longer than the reading itself.
    """

    def __init__(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self.transport: asyncio.Transport | None = None
        self.reader: SseReader | None = None
        self.ended: asyncio.Future[None] | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now, data = perf_counter(), bytes(memoryview(self._buffer)[:nbytes])
        if self.reader is None or self.ended is None:
            return
        try:
            self.reader.feed(data, now)
        except ValueError as error:  # msgspec's are, too
            self._end(error)
            return
        if self.reader.is_done:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self.reader is not None:
            self.reader.end_of_connection()
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if self.ended is not None and not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    async def request(self, data: bytes) -> SseReader:
        """Send a request; return what came when its answer, or the connection, has ended."""
        assert self.transport is not None
        self.reader, self.ended = SseReader(), asyncio.get_running_loop().create_future()
        self.transport.write(data)
        try:
            await self.ended
        finally:
            reader, self.reader, self.ended = self.reader, None, None
        return reader


class HttpTarget:
    """A server. Use it in an event loop, and ``close`` it there.

    Args:
        url: of the server.
        key: API key.
        timeout_s: of a whole request.

    Raises:
        ConfigError: the URL is malformed.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = base_url(url)
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix, self._timeout_s = parts.path, timeout_s
        self._idle: list[_Connection] = []
        self._buffer = bytearray(RECEIVE_BYTES)
        lines = [f"Host: {host_in_url(self._host)}:{self._port}", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        self._headers = "\r\n".join(lines)

    async def send(self, path: str, body: Mapping[str, Any]) -> Outcome:
        """Send a request and read its answer to the end; what goes wrong is the outcome's ``error``."""
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(data)}\r\n\r\n"
        sent_at, reader, error = perf_counter(), SseReader(), ""
        try:
            async with asyncio.timeout(self._timeout_s):
                sent_at, reader = await self._exchange(head.encode() + data)
        except TimeoutError:
            error = "timeout"
        except (OSError, ValueError) as failure:
            error = type(failure).__name__
        return Outcome(
            sent_at,
            perf_counter(),
            error or reader.error_code,
            reader.prompt_tokens,
            reader.cached_tokens,
            reader.num_tokens,
            reader.arrivals,
            reader.token_ids,
            "".join(reader.text),
        )

    async def _exchange(self, data: bytes) -> tuple[float, SseReader]:
        """Return when the request was sent, a new connection's opening included, and what came."""
        while True:
            is_kept, sent_at = bool(self._idle), perf_counter()
            connection = self._idle.pop() if is_kept else await self._connect()
            if connection.is_closed:
                continue
            try:
                reader = await connection.request(data)
            except BaseException:
                if connection.transport is not None:
                    connection.transport.abort()
                raise
            if is_kept and connection.is_closed and not reader.status:
                continue  # the server has closed an idle connection meanwhile
            if reader.is_done and reader.keeps_alive and not connection.is_closed:
                self._idle.append(connection)
            elif connection.transport is not None:
                connection.transport.close()
            return sent_at, reader

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        make = partial(_Connection, self._buffer)
        _, connection = await loop.create_connection(make, self._host, self._port, ssl=self._ssl)
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()
