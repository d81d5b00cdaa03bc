"""The rules for clients' connections, requests and answers, which come before Ray's own in HAProxy's frontend."""

from __future__ import annotations

from deployments.proxy.answers import (
    BAD_GATEWAY,
    HEADERS_TOO_LARGE,
    INTERNAL_ERROR,
    INVALID_HTTP,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    NOT_READY,
    TIMEOUT,
    UNEXPECTED_BODY,
    URI_TOO_LONG,
    returned,
)
from deployments.proxy.backends import wait_for_stream_rules
from deployments.proxy.limits import ProxyLimits

__all__ = ["CLIENT_HEADER", "DROPPED_HEADERS", "EARLY_ERRORS", "LOOPBACK", "REQUEST_ID", "client_rules"]

LOOPBACK = "127.0.0.1"
IPV6_PREFIX = 64  # bits of an address that one client does not choose
CLIENT_HEADER = "x-pagoda-client"  # with the address that connects; the ingress reads it
# Headers of requests that servers obey, by the beginnings of their names if those end with a dash. Ray Serve takes
# `_` for `-` in some of them.
DROPPED_HEADERS = (
    "x-request-disconnect-disabled",  # Ray Serve: no end at a disconnect
    "x-request-timeout-seconds",
    "serve-multiplexed-model-id",
    "x-session-id",
    "x-serve-router-",
    "forwarded",  # uvicorn, from proxies on this machine: another client, another scheme
    "x-forwarded-",
)
REQUEST_ID = "^[!-~]{1,128}$"  # of a request, else the ingress makes one; Ray Serve fails at bytes that are not UTF-8
TRACE_HEADERS = ("traceparent", "tracestate")  # with Ray's tracing, likewise
# Where an answer's headers are kept for the answer that HAProxy makes of it; the first also names answers of its own.
REQUEST_ID_VARIABLE = "txn.pagoda_id"
KEPT_HEADERS = {
    "x-request-id": REQUEST_ID_VARIABLE,
    "request-id": "txn.pagoda_messages_id",  # of the Messages API
    "www-authenticate": "txn.pagoda_authenticate",
    "allow": "txn.pagoda_allow",
    "accept-encoding": "txn.pagoda_accept_encoding",
}
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE"
WITHOUT_BODY = "GET HEAD DELETE OPTIONS TRACE"
# HAProxy's parser accepts larger heads, so that these get an answer of ours; see configuration.py.
MAX_URL_BYTES, MAX_HEADER_BYTES = 2**13, 2**14
CONTROL_CHARACTERS = r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]"  # HAProxy's parser accepts them, the ingress's does not
# Instead of texts of Ray Serve and of uvicorn, the ingress's server; every other error has a body of ours.
INSTEAD_OF_TEXT = (INVALID_HTTP, NOT_FOUND, METHOD_NOT_ALLOWED, TIMEOUT, INTERNAL_ERROR, BAD_GATEWAY, NOT_READY)
# With which the ingress may answer before the body of the request has come.
EARLY_ERRORS = (400, 401, 403, 404, 405, 408, 413, 415)


def client_rules(limits: ProxyLimits) -> list[str]:
    """Return the rules, in HAProxy's order."""
    has_id = f"{{ req.fhdr_cnt(x-request-id) eq 1 }} {{ req.fhdr(x-request-id) -m reg '{REQUEST_ID}' }}"
    name = f"http-request set-var({REQUEST_ID_VARIABLE}) req.fhdr(x-request-id) if {has_id}"
    requests = [name, *_requests(), *_headers(), *_expectations(limits)]
    return [*_connections(limits), *wait_for_stream_rules(), *requests, *_answers()]


def _connections(limits: ProxyLimits) -> list[str]:
    rules = [f"tcp-request connection reject if {{ fe_conn gt {limits.max_connections} }} !{{ src {LOOPBACK} ::1 }}"]
    if limits.max_connections_per_address:
        rules += [
            "stick-table type ipv6 size 100k expire 60s store conn_cur",
            f"tcp-request connection track-sc0 src,ipmask(32,{IPV6_PREFIX})",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {limits.max_connections_per_address} }}",
        ]
    return rules


def _headers() -> list[str]:
    names = "|".join(_pattern(name) for name in DROPPED_HEADERS)
    return [
        f"http-request del-header '^({names})$' -m reg",
        "http-request del-header upgrade",  # no endpoint speaks WebSocket; Ray Serve would answer to it in plain text
        f"http-request del-header x-request-id unless {{ var({REQUEST_ID_VARIABLE}) -m found }}",
        *(rf"http-request del-header {name} if {{ req.fhdr({name}) -m reg '[\x80-\xff]' }}" for name in TRACE_HEADERS),
        f"http-request set-header {CLIENT_HEADER} %[src]",  # between whose requests the ingress takes turns
    ]


def _pattern(name: str) -> str:
    """Return the regular expression of a header's name, or of names that begin so."""
    return name.replace("-", "[-_]") + (".*" if name.endswith("-") else "")


def _requests() -> list[str]:
    """Return the answers to requests that HAProxy's parser accepts and no ingress is to get.

    The ingress's server has a text of its own for some; of a body that no endpoint reads, Serve would keep all.
    """
    without_body = f"{{ method {WITHOUT_BODY} }}"
    return [
        f"{returned(URI_TOO_LONG)} if {{ url,length gt {MAX_URL_BYTES} }}",
        f"{returned(HEADERS_TOO_LARGE)} if {{ req.hdrs,length gt {MAX_HEADER_BYTES} }}",
        f"{returned(UNEXPECTED_BODY)} if {without_body} {{ req.hdr_val(content-length) gt 0 }}",
        f"{returned(UNEXPECTED_BODY)} if {without_body} {{ req.hdr(transfer-encoding) -m found }}",
        f"{returned(METHOD_NOT_ALLOWED)} unless {{ method {METHODS} }}",
        f"{returned(INVALID_HTTP)} if {{ req.hdrs -m reg '{CONTROL_CHARACTERS}' }}",
    ]


def _expectations(limits: ProxyLimits) -> list[str]:
    """Return the rules that tell a client to send the body that it announces, so that the ingress never does.

    HAProxy 2.8 loses the body of an answer whose head comes in one packet with the ingress's "100 Continue", as happens
    on a busy machine: it takes that answer for one without a body. So it sends "100 Continue" itself, as it always does
    when it waits for a body; here it waits for one byte. A client without a body needs no answer to its expectation.
    """
    expects = "{ req.hdr(expect) -m str -i 100-continue }"
    time = round(1000 * limits.header_timeout_s)
    return [
        f"http-request wait-for-body time {time}ms at-least 1 if {expects} !{{ method {WITHOUT_BODY} }}",
        "http-request del-header expect",
    ]


def _answers() -> list[str]:
    """Return the rules that make the ingress's answers what clients expect, and name the request in all of them."""
    is_text = "{ status ge 400 } { res.hdr(content-type) -m beg text/plain }"
    rules = [
        f"http-response set-var({var}) res.fhdr({name}) if {{ res.fhdr({name}) -m found }}"
        for name, var in KEPT_HEADERS.items()
    ]
    rules += [
        f"{returned(error, 'http-response')} if {{ status {error.status} }} {is_text}" for error in INSTEAD_OF_TEXT
    ]
    rules += [
        f"{returned(INVALID_HTTP, 'http-response')} if {{ status lt 500 }} {is_text}",
        f"{returned(INTERNAL_ERROR, 'http-response')} if {is_text}",
        *_closing(),
        *(
            f"http-after-response set-header {name} %[var({var})] if {{ var({var}) -m found }}"
            for name, var in KEPT_HEADERS.items()
        ),
    ]
    return rules


def _closing() -> list[str]:
    """Return the rules that close the connection after an error that came before the request's body, or instead of it.

    A silent or slow client would hold it otherwise: HAProxy reads the rest of a body, but not after an answer of its
    own. So the ingress's answer becomes one. After a complete request that keeps the connection.
    """
    condition = f"if {{ method POST PUT PATCH }} {{ status {' '.join(map(str, EARLY_ERRORS))} }}"
    body = "content-type application/json lf-string %[var(txn.pagoda_body)]"
    return [
        f"http-response wait-for-body time 1s {condition}",
        f"http-response set-var(txn.pagoda_body) res.body {condition}",
        *(
            f"http-response return status {status} {body} if {{ var(txn.pagoda_body) -m found }} {{ status {status} }}"
            for status in EARLY_ERRORS
        ),
    ]
