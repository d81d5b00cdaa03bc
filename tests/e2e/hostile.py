"""Requests as clients send them that mean harm or are broken, as bytes, and what a server may answer to them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

COMPLETION: dict[str, Any] = {"prompt": "A KV cache", "max_tokens": 2}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "pagoda-demo"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}], "model": "pagoda-demo"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/invocations": COMPLETION,
}
PATHS = [*ENDPOINTS, "/v1/models", "/health", "/-/healthz", "/-/routes", "/metrics", "/load", "/openapi.json", "/"]
# Headers that Ray Serve, Starlette, uvicorn or HAProxy read.
HEADERS = [
    ("X-Request-Disconnect-Disabled", "?1"), ("X-Request-Timeout-Seconds", "0.001"),
    ("X-Request-Timeout-Seconds", "-1"), ("X-Request-Timeout-Seconds", "x"), ("Serve_Multiplexed_Model_Id", "other"),
    ("X-Serve-Router-Replica", "x"), ("X-Request-Id", "\x7f" * 40), ("X-Request-Id", "same"),
    ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-Proto", "javascript"), ("X-Forwarded-Prefix", "/../.."),
    ("Forwarded", "for=127.0.0.1;proto=https"), ("X-Real-IP", "::1"), ("X-Haproxy-Server-State", "UP"),
    ("X-HTTP-Method-Override", "DELETE"), ("Host", "evil.example:99999"), ("Host", ""), ("Origin", "null"),
    ("Authorization", "Bearer " + "x" * 4000), ("Authorization", "Basic ///"), ("X-Api-Key", "\x01"),
    ("Cookie", "a=b; " * 400), ("Expect", "100-continue"), ("Expect", "the-impossible"), ("Connection", "Upgrade, x"),
    ("Upgrade", "websocket"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"), ("TE", "trailers"),
    ("Keep-Alive", "timeout=99999999"), ("Connection", "keep-alive"), ("Range", "bytes=0-0,-1"),
    ("Accept", "text/html"),
    ("Accept-Encoding", "gzip;q=9"), ("Content-Encoding", "gzip"), ("Content-Encoding", "br, zstd"),
    ("Content-Type", "text/html"), ("Content-Type", "application/json; charset=utf-7"), ("Content-Type", "\xff"),
    ("Content-Type", "multipart/form-data"), ("If-None-Match", "*"), ("Max-Forwards", "0"), ("Traceparent", "00-0-0-0"),
    ("Traceparent", f"00-{'f' * 32}-{'f' * 16}-01"), ("Tracestate", "=,=;" * 99), ("Baggage", "a=" + "b" * 3000),
    ("Transfer-Encoding", "gzip, chunked"), ("Transfer-Encoding", "chunked, identity"), ("Content-Length", "+5"),
    ("Content-Length", "-1"), ("Content-Length", "99999999999999999999"), ("Content-Length", "5, 6"), ("", "empty"),
    ("a" * 9000, "b"), ("X-Long", "b" * 40_000), ("X-Null", "a\0b"), ("X Space", "a"), ("X-Fold", "a\r\n b"),
]  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "G" * 200, "\0"]
TARGETS = [
    "/v1/" + "a" * 9000, "/" + "a" * 40_000, "/v1/../../etc/passwd", "/v1/completions/../models", "//v1//models", "*",
    "/%00", "/%ff%fe", "/v1/completions%0d%0aX-Injected:%201", "/v1/models?" + "a=b&" * 2000, "http://evil.example/",
    "http://127.0.0.1/v1/models", "/v1/responses/" + "x" * 300, "/v1/responses/%2e%2e", "/static/../../pyproject.toml",
    "/v1/models#fragment", "v1/models", "", "/v1/mod els", "/\xe9", "/v1/completions;a=b",
    "/web/%2e%2e/%2e%2e/config.py",
]  # fmt: skip
NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    b"GET /health\r\n\r\n", b"GET /health HTTP/3.0\r\n\r\n", b"\r\n" * 300, bytes(range(256)), b"SSH-2.0-x\r\n",
    b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", b"GET /health HTTP/1.1\nHost: a\n\n", b"GET\t/health\tHTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET /health HTTP/1.1\r\n\r\n",
]  # fmt: skip


VALUES: list[Any] = [
    None, True, -1, 0, 2**70, -(2**70), 1.5, 1e308, "", " ", "x" * 10_000, "\0\ud800", [], [[]], [None], {}, {"": {}},
    {"type": "object"}, [{"role": "user"}], "\u202e", "0", [-1], [2**40], {"a": [{"b": 1}] * 50},
]  # fmt: skip
FIELDS = [
    "model", "stream", "stream_options", "n", "best_of", "temperature", "top_p", "top_k", "seed", "stop", "logprobs",
    "logit_bias", "tools", "tool_choice", "response_format", "user", "metadata", "priority", "cache_salt", "echo",
]  # fmt: skip
NOT_A_BODY = [
    b"", b"{", b"[1]", b"null", b'"a"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 20_000, b'{"a":' * 20_000, b"NaN",
    b'{"prompt": NaN}', b'{"prompt": 1e999}', b'{"prompt": "a", "prompt": 5}', b'{"prompt": "\xff"}', bytes(99),
    b"{}{}", b'{"prompt": ' + b"9" * 5000 + b"}", b" " * 50_000, "{}".encode("utf-16"), b'{"messages": "\\ud800"}',
]  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A request: its name for messages, its bytes, and whether the client then ends its side of the connection."""

    name: str
    data: bytes
    half_closes: bool = False


@dataclass(frozen=True)
class Answer:
    """What came back; ``status`` is 0 if that was no HTTP."""

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
    lines = [f"{name}: {value}" for name, value in [*headers, *(one for one in needed if one[0].lower() not in names)]]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def each_once() -> Iterator[Sent]:
    """Every header, method, target and piece of other protocols once, then framings that lie."""
    for header in HEADERS:
        body = json.dumps(COMPLETION).encode()
        yield Sent(f"header {header!r:.60}", request("POST", "/v1/completions", [header], body))
    for method in METHODS:
        yield Sent(f"method {method!r:.20}", request(method, "/v1/completions", []))
    for target in TARGETS:
        yield Sent(f"target {target!r:.40}", request("GET", target, []))
    for data in NOT_HTTP:
        yield Sent(f"not HTTP {data!r:.40}", data)
    yield from _framings()


def _framings() -> Iterator[Sent]:
    """Bodies whose announced length or chunks are wrong."""
    body = json.dumps(COMPLETION).encode()
    chunked = [("Transfer-Encoding", "chunked")]
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
        yield Sent(name, request("POST", "/v1/completions", headers, sent))


def mixtures(rng: random.Random) -> Iterator[Sent]:
    """Random mixtures of endpoints, methods, headers, and bytes changed, without end."""
    while True:
        target = rng.choice([*PATHS, *PATHS, *TARGETS])
        method = rng.choice(["POST", "POST", "POST", *METHODS])
        headers = rng.sample(HEADERS, rng.randrange(4))
        body = json.dumps(ENDPOINTS.get(target, COMPLETION) | {"stream": rng.random() < 0.3}).encode()
        data = bytearray(request(method, target, headers, body if method == "POST" else b""))
        for _ in range(rng.choice([0, 0, 1, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        end = rng.choice([len(data), len(data), len(data), rng.randrange(len(data))])
        yield Sent(f"mixture {bytes(data[:60])!r}", bytes(data[:end]), half_closes=rng.random() < 0.1)


def headers_everywhere() -> Iterator[Sent]:
    """Every header at every endpoint."""
    for path, body in ENDPOINTS.items():
        for header in HEADERS:
            yield Sent(f"{path} {header!r:.60}", request("POST", path, [header], json.dumps(body).encode()))


def strange_bodies(rng: random.Random) -> Iterator[Sent]:
    """Bodies that are no JSON at every endpoint, then bodies with a strange value in a field, without end."""
    for path in ENDPOINTS:
        for data in NOT_A_BODY:
            yield Sent(f"{path} {data[:40]!r}", request("POST", path, [], data))
    while True:
        path, valid = rng.choice(list(ENDPOINTS.items()))
        # Without a limit an answer would be as long as the context.
        value, field = rng.choice(VALUES), rng.choice([*FIELDS, *(name for name in valid if "max" not in name)])
        data = json.dumps(valid | {field: value}).encode()
        yield Sent(f"{path} {field}={value!r:.40}", request("POST", path, [], data))


async def exchange(port: int, sent: Sent, *, timeout_s: float = 60.0) -> Answer:
    """Send a request, and read until its answer is complete or the server closes.

    Raises:
        TimeoutError: if neither happens in time.
    """
    has_body = not sent.data.startswith(b"HEAD ")
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = b""
        try:
            with suppress(OSError):  # the server may close before it has read everything
                writer.write(sent.data)
                if sent.half_closes:
                    writer.write_eof()
                await writer.drain()
            with suppress(OSError):
                while not (answer := _parsed(received, has_body)).is_complete and (data := await reader.read(2**16)):
                    received += data
        finally:
            writer.transport.abort()
    return answer


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
        is_complete = len(body) >= int(headers["content-length"])
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
