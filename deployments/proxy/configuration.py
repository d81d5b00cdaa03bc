"""`python configuration.py FILE`: makes HAProxy's configuration, as Ray Serve writes it, safe for open networks.

haproxy.sh runs this before each start and reload of HAProxy, for which Ray writes the file anew.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run by its path

from deployments.proxy.limits import ProxyLimits
from deployments.proxy.probes import HEALTH_PATHS, with_probe_backends

__all__ = ["UnknownConfigurationError", "error_files", "hardened", "main", "within_file_limit"]

RESERVED_CONNECTIONS = 256  # for this machine's own probes, and for HAProxy's pages
FILES_OF_ITS_OWN = 256
# An ingress that is busy answers HAProxy's checks late, each within 5 s or not at all; one that has died refuses them.
CHECKS_UNTIL_DOWN = 6
CLIENT_TIMEOUT_S = 60  # for a client that does not read its answer, or does not send a body that no one waits for
LOOPBACK = "127.0.0.1"
MARK = "# Changed by Pagoda, see deployments/proxy/configuration.py\n"
# With these, Ray Serve lets a client change how its request is served: no end at a disconnect, other time-outs.
RAY_HEADERS = ("x-request-disconnect-disabled", "x-request-timeout-seconds", "serve_multiplexed_model_id")
RAY_HEADER_PREFIX = "x-serve-router-"
CLIENT_HEADER = "x-pagoda-client"  # as deployments/api/body.py reads it
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE"
CONTROL_CHARACTERS = r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]"  # HAProxy's parser accepts them, the ingress's does not


class OwnError(NamedTuple):
    """What HAProxy itself answers, in the terms of the OpenAI error body."""

    status: int
    kind: str
    code: str
    message: str


INVALID_HTTP = OwnError(
    400,
    "invalid_request_error",
    "invalid_http",
    "the request is not valid HTTP, or the client closed its side of the connection before the answer",
)
NOT_FOUND = OwnError(404, "not_found_error", "not_found", "no application has this path")
NOT_READY = OwnError(
    503,
    "overloaded_error",
    "no_ingress",
    "no ingress is ready: replicas are starting, or wait for resources; `serve status` shows which",
)
UNKNOWN_METHOD = OwnError(405, "invalid_request_error", "method_not_allowed", "no path accepts this method")
OWN_ERRORS = (
    INVALID_HTTP,
    OwnError(408, "timeout_error", "timeout", "the request did not arrive in time; send it without pauses"),
    OwnError(500, "server_error", "internal_error", "the proxy failed; try again"),
    OwnError(502, "server_error", "bad_gateway", "the ingress that served this request was lost; try again"),
    OwnError(503, "overloaded_error", "no_ingress", "no ingress is ready; try again shortly"),
    OwnError(504, "timeout_error", "timeout", "the ingress did not answer in time; try again"),
)


class UnknownConfigurationError(Exception):
    """The file is not what this version of Ray Serve writes."""


def hardened(text: str, limits: ProxyLimits, directory: Path) -> str:
    """Return the configuration with limits, JSON errors, and pages and sockets for this machine and user only.

    Args:
        text: the configuration as Ray writes it.
        limits: for clients.
        directory: of the files with HAProxy's own answers; see ``error_files``.

    Raises:
        UnknownConfigurationError: a line that must be changed is not there.
    """
    own = f"bind {LOOPBACK}:"
    text = _replaced(text, r"^( +)maxconn \d+$", rf"\g<1>maxconn {limits.max_connections + RESERVED_CONNECTIONS}")
    text = _replaced(text, r"^( +stats socket \S+ )mode 666 ", r"\g<1>mode 600 ")
    text = _replaced(text, r"^ +log 127\.0\.0\.1:514 .*\n", "", at_least=0)  # each request's path, for any syslog there
    text = _replaced(text, r"^( +)errorfile \d+ .*\n", "", at_least=0)
    text = _replaced(text, r"^ +timeout client .*\n", "")
    text = _replaced(text, r"^defaults\n", "defaults\n" + _lines(_defaults(limits, directory)))
    text = _replaced(text, r"^(frontend prometheus\n +)bind :", rf"\g<1>{own}")
    text = _replaced(text, r"^(listen stats\n +)bind \*:", rf"\g<1>{own}")
    rules = _lines(_frontend(limits)).replace("\\", r"\\")  # which has a meaning in a replacement
    text = _replaced(text, r"^(frontend http_frontend\n +bind .*\n)", rf"\g<1>{rules}")
    text = _replaced(text, r"^( +default-server .*\bfall) \d+", rf"\g<1> {CHECKS_UNTIL_DOWN}", at_least=0)
    text = with_probe_backends(text, f"{_http_error(NOT_READY)} hdr Retry-After 5")
    text = "".join(map(_with_health, re.split(r"^(?=\S)", text, flags=re.MULTILINE)))
    return _replaced(text, r"^( +)http-request return status 404 .*$", rf"\g<1>{_return(NOT_FOUND)}")


def _with_health(section: str) -> str:
    """Return a section with an answer to health checks if it is a backend.

    It is used while no ingress is up: Serve's own proxy, which is the backup, would let them wait.
    """
    backend = re.match(r"backend (\S+)\n", section)
    servers = re.findall(r"^ +server (\S+) .*?(backup)?$", section, flags=re.MULTILINE)
    if backend is None or not any(backup for _, backup in servers):
        return section
    ingresses = [name for name, backup in servers if not backup]
    condition = f"{{ path -m end {' '.join(HEALTH_PATHS)} }}{' !an_ingress_is_up' if ingresses else ''}"
    is_up = [f"acl an_ingress_is_up srv_is_up({backend[1]}/{name})" for name in ingresses]
    return section + _lines([*is_up, f"{_return(NOT_READY)} hdr Retry-After 5 if {condition}"])


def error_files() -> dict[str, str]:
    """Return HAProxy's own answers, as HTTP, by the names of their files.

    What its parser rejects gets an answer that is part of the program.
    """
    return {f"{error.status}.http": _as_http(error) for error in OWN_ERRORS}


def _as_http(error: OwnError) -> str:
    body = _body(error)
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Retry-After: 1"] if error.status == HTTPStatus.SERVICE_UNAVAILABLE else []),
    ]
    return "\r\n".join([*head, "", body])


def _return(error: OwnError) -> str:
    return f"http-request return status {error.status} content-type application/json string '{_body(error)}'"


def _http_error(error: OwnError) -> str:
    return f"http-error status {error.status} content-type application/json string '{_body(error)}'"


def _body(error: OwnError) -> str:
    return json.dumps({"error": {"message": error.message, "type": error.kind, "param": None, "code": error.code}})


def _defaults(limits: ProxyLimits, directory: Path) -> list[str]:
    errors = [f"errorfile {error.status} {directory / f'{error.status}.http'}" for error in OWN_ERRORS]
    timeouts = [
        f"timeout http-request {round(1000 * limits.header_timeout_s)}ms",
        f"timeout client {CLIENT_TIMEOUT_S}s",
    ]
    return [*timeouts, *errors]


def _frontend(limits: ProxyLimits) -> list[str]:
    """Return the rules for connections and heads of requests, which come before Ray's own."""
    rules = [f"tcp-request connection reject if {{ fe_conn gt {limits.max_connections} }} !{{ src {LOOPBACK} ::1 }}"]
    if limits.max_connections_per_address:
        rules += [
            "stick-table type ipv6 size 100k expire 60s store conn_cur",
            "tcp-request connection track-sc0 src",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {limits.max_connections_per_address} }}",
        ]
    rules += [f"http-request del-header {name}" for name in RAY_HEADERS]
    rules += [f"http-request del-header {RAY_HEADER_PREFIX} -m beg"]
    rules += [f"http-request set-header {CLIENT_HEADER} %[src]"]  # between whose requests the ingress takes turns
    # The ingress's server would answer to these with a text of its own.
    rules += [f"{_return(UNKNOWN_METHOD)} unless {{ method {METHODS} }}"]
    # What else it cannot parse; every other error has a body of ours.
    unparsed = _return(INVALID_HTTP).replace("http-request", "http-response")
    rules += [f"{unparsed} if {{ status 400 }} {{ res.hdr(content-type) -m beg text/plain }}"]
    rules += ["http-after-response set-header connection close if { status 408 413 }"]
    return [*rules, f"{_return(INVALID_HTTP)} if {{ req.hdrs -m reg '{CONTROL_CHARACTERS}' }}"]


def within_file_limit(limits: ProxyLimits, max_files: int) -> ProxyLimits:
    """Return the limits for a process that may open so many files; HAProxy would not start with too many connections.

    It counts two files and half a pipe for a connection, and some for itself.
    """
    possible = 2 * (max_files - FILES_OF_ITS_OWN) // 5 - RESERVED_CONNECTIONS
    return replace(limits, max_connections=max(1, min(limits.max_connections, possible)))


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _replaced(text: str, pattern: str, replacement: str, *, at_least: int = 1) -> str:
    result, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if count < at_least:
        raise UnknownConfigurationError(f"no line is like '{pattern}'; is this Ray Serve 2.60?")
    return result


def main(arguments: list[str]) -> int:
    """Change the file in its place, since Ray finds its HAProxy by the file's name; returns the exit code."""
    path = Path(arguments[0])
    try:
        text = path.read_text()
        if not text.startswith(MARK):
            limits = ProxyLimits.from_environment(os.environ)
            _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # HAProxy raises its own to this
            if max_files != resource.RLIM_INFINITY:
                limits = within_file_limit(limits, max_files)
            changed = hardened(text, limits, path.parent)
            for name, answer in error_files().items():
                path.with_name(name).write_bytes(answer.encode())
            path.write_text(MARK + changed)
    except (UnknownConfigurationError, ValueError, OSError) as error:
        print(f"pagoda: {path} cannot be made safe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
