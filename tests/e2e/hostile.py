"""Requests as clients send them that mean harm or are broken, as bytes, and what a server may answer to them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from tests.e2e.strange import (
    COMPLETION,
    DELETES,
    ENDPOINTS,
    FIELDS,
    GETS,
    HEADERS,
    METHODS,
    NOT_A_BODY,
    NOT_HTTP,
    PATHS,
    TARGETS,
    UNPARSED_HEADERS,
    UNPARSED_METHODS,
    UNPARSED_TARGETS,
    VALUES,
)
from tests.waiting import HANG_S

MAX_HEAD_BYTES = 31 * 1024  # that HAProxy's parser accepts


@dataclass(frozen=True)
class Sent:
    """A request.

    Attributes:
        name: for messages.
        data: its bytes.
        half_closes: the client then ends its side of the connection.
        is_parsed: HAProxy's parser accepts it, so that the answer has the form of this API.
    """

    name: str
    data: bytes
    half_closes: bool = False
    is_parsed: bool = True


@dataclass(frozen=True)
class Answer:
    """What came back; ``status`` is 0 if that was not HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool


def request(method: str, target: str, headers: list[tuple[str, str]], body: bytes = b"") -> bytes:
    """Return a request with exactly these headers, and those that a valid one needs if they are missing."""
    names = {name.lower() for name, _ in headers}
    needed = [("Host", "pagoda"), ("Content-Type", "application/json"), ("Connection", "close")]
    if not names & {"content-length", "transfer-encoding"}:
        needed.append(("Content-Length", str(len(body))))
    missing = [(name, value) for name, value in needed if name.lower() not in names]
    lines = [f"{name}: {value}" for name, value in [*headers, *missing]]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def each_once() -> Iterator[Sent]:
    """Every header, method, target and piece of other protocols once, then framings that lie."""
    body = json.dumps(COMPLETION).encode()
    for header in [*HEADERS, *UNPARSED_HEADERS]:
        data = request("POST", "/v1/completions", [header], body)
        yield Sent(f"header {header!r:.60}", data, is_parsed=header not in UNPARSED_HEADERS)
    for method in [*METHODS, *UNPARSED_METHODS]:
        data = request(method, "/v1/completions", [])
        yield Sent(f"method {method!r:.20}", data, is_parsed=method not in UNPARSED_METHODS)
    for target in [*TARGETS, *UNPARSED_TARGETS]:
        yield Sent(f"target {target!r:.40}", request("GET", target, []), is_parsed=target not in UNPARSED_TARGETS)
    for data in NOT_HTTP:
        yield Sent(f"not HTTP {data!r:.40}", data, is_parsed=False)
    for protocol in ("websocket", "h2c"):
        headers = [("Connection", "Upgrade"), ("Upgrade", protocol), ("Sec-WebSocket-Version", "13")]
        headers.append(("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="))
        yield from (Sent(f"{protocol} at {path}", request("GET", path, headers)) for path in GETS)
    yield from (Sent(f"half-closed {path}", request("GET", path, []), half_closes=True) for path in GETS)
    yield from _framings()


def _framings() -> Iterator[Sent]:
    """Bodies whose announced length or chunks are wrong."""
    body = json.dumps(COMPLETION).encode()
    chunked = [("Transfer-Encoding", "chunked")]
    unparsed = ("two lengths", "a negative chunk")
    for name, headers, sent in (
        ("body too short", [("Content-Length", "999")], body),
        ("body too long", [("Content-Length", "5")], body),
        ("length of 1 EiB", [("Content-Length", str(2**60))], body),
        ("two lengths", [("Content-Length", "5"), ("Content-Length", str(len(body)))], body),
        ("length and chunks", [("Content-Length", "5"), *chunked], b"0\r\n\r\n" + request("GET", "/metrics", [])),
        ("chunks", chunked, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
        ("a chunk too long", chunked, b"fffffff\r\n" + body),
        ("a negative chunk", chunked, b"-5\r\n" + body),
        ("no last chunk", chunked, b"%x\r\n%s\r\n" % (len(body), body)),
        ("a chunk's extension", chunked, b"5;" + b"a" * 20_000 + b"\r\nabcde\r\n0\r\n\r\n"),
        ("trailers", chunked, b"%x\r\n%s\r\n0\r\nX: y\r\nHost: z\r\n\r\n" % (len(body), body)),
        ("pipelined", [("Connection", "keep-alive")], body + request("GET", "/health", []) * 20),
    ):
        yield Sent(name, request("POST", "/v1/completions", headers, sent), is_parsed=name not in unparsed)


def mixtures(rng: random.Random) -> Iterator[Sent]:
    """Random mixtures of endpoints, methods and headers, some cut off or with bytes changed, without end."""
    while True:
        target = rng.choice([*PATHS, *PATHS, *TARGETS])
        method = rng.choice(["POST", "POST", "POST", *METHODS])
        headers = rng.sample(HEADERS, rng.randrange(4))
        body = json.dumps(ENDPOINTS.get(target, COMPLETION) | {"stream": rng.random() < 0.3}).encode()
        whole = request(method, target, headers, body if method == "POST" else b"")
        data = bytearray(whole)
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        end = rng.choice([*[len(data)] * 5, rng.randrange(len(data))])
        has_one_host = sum(name == "Host" for name, _ in headers) < 2
        fits = len(whole) < MAX_HEAD_BYTES
        yield Sent(
            f"mixture {bytes(data[:60])!r}",
            bytes(data[:end]),
            half_closes=rng.random() < 0.1,
            is_parsed=data[:end] == whole and has_one_host and fits,
        )


def headers_everywhere() -> Iterator[Sent]:
    """Every header at every endpoint."""
    for header in HEADERS:
        for path, body in ENDPOINTS.items():
            yield Sent(f"{path} {header!r:.60}", request("POST", path, [header], json.dumps(body).encode()))
        for method, paths in (("GET", GETS), ("DELETE", DELETES)):
            yield from (Sent(f"{path} {header!r:.60}", request(method, path, [header])) for path in paths)


def strange_bodies(rng: random.Random) -> Iterator[Sent]:
    """Bodies that are not JSON at every endpoint, then bodies with a strange value in a field, without end."""
    for path in ENDPOINTS:
        for data in NOT_A_BODY:
            yield Sent(f"{path} {data[:40]!r}", request("POST", path, [], data))
    while True:
        path, valid = rng.choice(list(ENDPOINTS.items()))
        # Without a limit an answer would be as long as the context.
        value, field = rng.choice(VALUES), rng.choice([*FIELDS, *(name for name in valid if "max" not in name)])
        data = json.dumps(valid | {field: value}).encode()
        yield Sent(f"{path} {field}={value!r:.40}", request("POST", path, [], data))


def in_a_hurry(sent: Sent) -> Sent:
    """Let the client of an incomplete request end its side: the server would wait ten seconds for the rest."""
    head, end, body = sent.data.partition(b"\r\n\r\n")
    lengths = re.findall(rb"(?im)^content-length: *(\d+)\r?$", head)
    if re.search(rb"(?im)^transfer-encoding: *chunked\r?$", head):
        is_complete = body.endswith(b"0\r\n\r\n")
    else:
        is_complete = bool(head and end) and len(body) >= int(lengths[0] if lengths else 0)
    return sent if is_complete else replace(sent, half_closes=True)


@asynccontextmanager
async def _sending(port: int, sent: Sent) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """Send a request; yield what receives more of the answer, and nothing once the server has closed.

    asyncio's streams would lose what came just before a reset, with which a server ends a body that it has not read.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        with suppress(OSError):  # the server may close before it has read everything
            await loop.sock_sendall(connection, sent.data)
            if sent.half_closes:
                connection.shutdown(socket.SHUT_WR)

        async def receive() -> bytes:
            with suppress(OSError):
                return await loop.sock_recv(connection, 2**16)
            return b""

        yield receive


async def exchange(port: int, sent: Sent) -> Answer:
    """Send a request, and read until its answer is complete or the server closes.

    Raises:
        TimeoutError: neither happens.
    """
    has_body, received = not sent.data.startswith(b"HEAD "), b""
    async with asyncio.timeout(HANG_S), _sending(port, sent) as receive:
        while not (answer := _parsed(received, has_body)).is_complete and (data := await receive()):
            received += data
    return answer


async def until_closed(port: int, sent: Sent) -> Answer:
    """Send a request; return its answer when the server has closed the connection.

    Raises:
        TimeoutError: the server does not close it.
    """
    received = b""
    async with asyncio.timeout(HANG_S), _sending(port, sent) as receive:
        while data := await receive():
            received += data
        return _parsed(received, has_body=True)


def _parsed(received: bytes, has_body: bool) -> Answer:
    head, end, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if not end or not first.startswith("HTTP/1.") or not words[1].isdecimal():
        return Answer(0, {}, received, is_complete=False)
    if words[1] == "100":
        return _parsed(body, has_body)
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if not has_body:
        is_complete = True
    elif "content-length" in headers:
        length = int(headers["content-length"])
        is_complete = len(body) >= length
        body = body[:length]  # the answer to what came after this request may follow
    else:
        is_complete = body.endswith(b"0\r\n\r\n")
    return Answer(int(words[1]), headers, body, is_complete)


def json_error(answer: Answer) -> dict[str, Any] | None:
    """Return the error object in an answer's body; None if it is something else."""
    with suppress(ValueError, TypeError, KeyError):
        error = json.loads(answer.body)["error"]
        if isinstance(error["message"], str):
            return dict(error)
    return None
