"""What HAProxy itself answers, in the terms of the OpenAI error body, and as lines of its configuration."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import NamedTuple

__all__ = [
    "BAD_GATEWAY",
    "HEADERS_TOO_LARGE",
    "INTERNAL_ERROR",
    "INVALID_HTTP",
    "METHOD_NOT_ALLOWED",
    "NOT_FOUND",
    "NOT_READY",
    "TIMEOUT",
    "UNEXPECTED_BODY",
    "URI_TOO_LONG",
    "OwnError",
    "as_http",
    "error_files",
    "http_error",
    "returned",
    "with_json_errors",
]


class OwnError(NamedTuple):
    """An error that is answered without an ingress, or instead of an ingress's text; no apostrophe in the message."""

    status: int
    kind: str
    code: str
    message: str
    retry_after_s: int | None = None


INVALID_HTTP = OwnError(
    400,
    "invalid_request_error",
    "invalid_http",
    "the request is not valid HTTP, or the client closed its side of the connection before the answer",
)
NOT_FOUND = OwnError(404, "not_found_error", "not_found", "no application has this path")
METHOD_NOT_ALLOWED = OwnError(405, "invalid_request_error", "method_not_allowed", "no path accepts this method")
TIMEOUT = OwnError(408, "timeout_error", "timeout", "the request did not arrive in time; send it without pauses")
INTERNAL_ERROR = OwnError(500, "server_error", "internal_error", "the server failed; try again")
URI_TOO_LONG = OwnError(414, "invalid_request_error", "uri_too_long", "the URL is longer than 8 KiB")
HEADERS_TOO_LARGE = OwnError(
    431, "invalid_request_error", "headers_too_large", "the headers are larger than 16 KiB together; send less"
)
UNEXPECTED_BODY = OwnError(
    400, "invalid_request_error", "unexpected_body", "a request of this method has no body; send it by POST"
)
BAD_GATEWAY = OwnError(502, "server_error", "bad_gateway", "the ingress that served this request was lost; try again")
NOT_READY = OwnError(
    503,
    "overloaded_error",
    "no_ingress",
    "no ingress is ready: replicas are starting, or wait for resources; `serve status` shows which",
    retry_after_s=5,
)
NO_INGRESS = OwnError(503, "overloaded_error", "no_ingress", "no ingress is ready; try again shortly", retry_after_s=1)
GATEWAY_TIMEOUT = OwnError(504, "timeout_error", "timeout", "the ingress did not answer in time; try again")

_METHODS = "DELETE, GET, HEAD, POST"  # that some path accepts

# Of Serve's own paths, while it starts or drains.
_TEXT = re.compile(r'http-request return status (?P<status>503) content-type text/plain string "(?P<text>[^"]*)"')
_FILES = (INVALID_HTTP, TIMEOUT, INTERNAL_ERROR, BAD_GATEWAY, NO_INGRESS, GATEWAY_TIMEOUT)


def with_json_errors(text: str) -> str:
    """Return the configuration with JSON instead of the texts that Ray lets HAProxy answer, and with what they say."""

    def as_json(rule: re.Match[str]) -> str:
        message = rule["text"].replace("'", "")
        error = OwnError(int(rule["status"]), "overloaded_error", "not_ready", message, retry_after_s=1)
        return f"http-request return {_answer(error)}"

    return _TEXT.sub(as_json, text)


def returned(error: OwnError, rules: str = "http-request") -> str:
    """Return the rule that answers with an error, among the rules for requests or for responses."""
    return f"{rules} return {_answer(error)}"


def http_error(error: OwnError) -> str:
    """Return the line that makes an error the answer to what HAProxy finds wrong with this status."""
    return f"http-error {_answer(error)}"


def _answer(error: OwnError) -> str:
    headers = "" if error.retry_after_s is None else f" hdr Retry-After {error.retry_after_s}"
    if error.status == 405:
        headers += f" hdr Allow '{_METHODS}'"
    return f"status {error.status} content-type application/json string '{_body(error)}'{headers}"


def error_files() -> dict[str, str]:
    """Return HAProxy's answers to what it finds wrong by itself, as HTTP, by the names of their files.

    What its parser rejects gets an answer that is part of the program.
    """
    return {f"{error.status}.http": as_http(error) for error in _FILES}


def as_http(error: OwnError) -> str:
    """Return the answer as HTTP."""
    body = _body(error)
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *([] if error.retry_after_s is None else [f"Retry-After: {error.retry_after_s}"]),
    ]
    return "\r\n".join([*head, "", body])


def _body(error: OwnError) -> str:
    assert "'" not in error.message
    return json.dumps({"error": {"message": error.message, "type": error.kind, "param": None, "code": error.code}})
