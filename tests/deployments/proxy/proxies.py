"""A HAProxy with the changed configuration, and a server after it that stands for the ingress."""

from __future__ import annotations

import csv
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

import httpx

from deployments.config import checkout_root
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.listeners import IPV6_VARIABLE, is_all_of_ipv6
from deployments.proxy.probe_frontend import PORT_VARIABLE
from tests.ports import free_port
from tests.waiting import HANG_S, until

LIMITS = ProxyLimits(
    max_connections=12,
    max_connections_per_address=3,
    header_timeout_s=HANG_S,
    keep_alive_timeout_s=HANG_S,
    send_timeout_s=HANG_S,
)
HASTY = replace(LIMITS, header_timeout_s=1.0, keep_alive_timeout_s=1.2, send_timeout_s=1.6)  # for what must time out
BODY_WAIT_S, ERROR_WAIT_S = 0.5, 1.0  # how long HAProxy waits for a body, and for an error to be whole
MAX_PAUSES = 20  # of the machine while one test runs
Result = TypeVar("Result")
CLIENTS = [f"127.0.0.{number}" for number in range(2, 6)]


class Ingress(BaseHTTPRequestHandler):
    """Answers with the headers that it gets."""

    protocol_version = "HTTP/1.1"
    head_arrived = threading.Event()  # set by a client, which then gets the body of /head-first
    may_answer = threading.Event()  # cleared by a client, whose POST or GET /slow is then not answered
    may_answer.set()
    is_asked = threading.Event()  # set by those requests
    wbufsize = -1  # an answer is one packet, as uvicorn's; HAProxy may reset the connection after an error's head

    def do_GET(self) -> None:
        if self.path.startswith("/text/"):
            self._send_text(int(self.path.rpartition("/")[2]))
            return
        if self.path == "/long":
            self._send_without_end()
            return
        if self.path == "/head-first":
            self._send_head_first()
            return
        if self.path == "/slow" or self.command == "POST":
            self.is_asked.set()
            assert self.may_answer.wait(HANG_S)
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Connection", str(self.client_address[1]))
        self.end_headers()
        self.wfile.write(body)

    def _send_head_first(self) -> None:
        """Send the body in a packet of its own, and the head in one with "100 Continue" if that is sent."""
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.flush()
        assert self.head_arrived.wait(HANG_S)
        self.wfile.write(b"body")

    def _send_without_end(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    def do_POST(self) -> None:
        """Answer, before the body is read if the path has the status."""
        body = json.dumps({"error": {"message": "a 'quoted' %[wörd]"}}, ensure_ascii=False).encode()
        if not self.path.startswith("/status/"):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()
            return
        self.send_response(int(self.path.split("/")[2]))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Request-Id", "made")
        self.send_header("Request-Id", "made")
        self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Accept-Encoding", "identity")
        self.end_headers()
        if self.path.endswith("/late"):
            assert self.may_answer.wait(HANG_S)
            self.wfile.flush()
            wait_until_read(self.connection)
        self.wfile.write(body)
        self.wfile.flush()
        with suppress(OSError):
            self.rfile.read(int(self.headers["Content-Length"]))

    def _send_text(self, status: int) -> None:
        """Answer as Ray Serve and uvicorn do if they fail."""
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", "4")
        self.send_header("X-Request-Id", self.headers.get("X-Request-Id", "made"))
        self.end_headers()
        self.wfile.write(b"text")

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


class Proxy:
    """A running HAProxy: its address, and its process."""

    def __init__(
        self, directory: Path, *ingresses: int, host: str = "127.0.0.1", limits: ProxyLimits = LIMITS, **options: Any
    ) -> None:
        self.host = host or "127.0.0.1"
        self.port, self.stats_port, self.metrics_port = free_port(), free_port(), free_port()
        self.socket, self.config = directory / "admin.sock", directory / "haproxy.cfg"
        ports = {"stats_port": self.stats_port, "metrics_port": self.metrics_port}
        write_config(self.config, *ingresses, frontend=self.port, host=host, **options, **ports)
        self.probe_port = free_port()
        own = {IPV6_VARIABLE: "1"} if is_all_of_ipv6(host) else {}
        environ = os.environ | own | limits.environment | {PORT_VARIABLE: str(self.probe_port)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [checkout_root() / "deployments/proxy/haproxy.sh", "-db", "-f", self.config], env=environ | {"PATH": path}
        )

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, address: str) -> httpx.Client:
        """Return a client with an address of its own."""
        return httpx.Client(base_url=self.url, transport=httpx.HTTPTransport(local_address=address), timeout=HANG_S)

    def connect(self, address: str) -> socket.socket:
        """Return a connection from an address."""
        return socket.create_connection((self.host, self.port), timeout=HANG_S, source_address=(address, 0))

    def command(self, text: str) -> str:
        """Return what HAProxy answers to a command."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.socket))
            admin.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()


def write_config(
    path: Path,
    *ingresses: int,
    frontend: int,
    host: str = "127.0.0.1",
    fallback: int | None = None,
    has_routes: bool = True,
    **ports: int,
) -> None:
    """Write the configuration for ingresses at these ports, as Ray does, and for Serve's own proxy after them.

    Without routes, Ray has not yet told HAProxy of any application.
    """
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    config = HAProxyConfig(
        socket_path=str(path.with_name("admin.sock")),
        server_state_base=str(path.parent),
        server_state_file=str(path.with_name("server-state")),
        metrics_socket_path=str(path.with_name("metrics.sock")),
        http_options=HTTPOptions(host=host, port=frontend),
        has_received_routes=has_routes,
        has_received_servers=True,
        health_check_fall=1000,  # a server that has passed a check stays, however long the machine pauses
        **ports,
    )
    servers = [ServerConfig(f"SERVE_REPLICA-app-ingress-{port}", "127.0.0.1", port) for port in ingresses]
    last = ServerConfig("SERVE_PROXY_ACTOR-fallback", "127.0.0.1", fallback) if fallback is not None else None
    backend = BackendConfig("http-app", "/", app_name="app", servers=servers, fallback_server=last)
    HAProxyApi(config, {"http-app": backend}, str(path))._generate_config_file_internal()


def hold(stack: ExitStack, proxy: Proxy, addresses: Sequence[str]) -> None:
    """Hold as many connections as each address may have, until the end of the ``stack``. Nothing else may connect."""
    until(lambda: not any(_counts(proxy).values()), "HAProxy counts no connection", pause_s=0.01)
    for address in addresses:
        for number in range(1, LIMITS.max_connections_per_address + 1):
            until(partial(_is_held, stack, proxy, address, number), "HAProxy holds the connection", pause_s=0.01)


def _is_held(stack: ExitStack, proxy: Proxy, address: str, number: int) -> bool:
    """Connect, and return whether HAProxy holds this connection, as the address's ``number``-th.

    Each of its threads counts a connection that it tries to accept, so one that comes alone may be too many.
    """
    try:
        client = proxy.connect(address)
    except ConnectionResetError:  # it was closed before this thread ran on
        return False
    is_counted = until(
        lambda: _counts(proxy).get(address, 0) == number or (_is_closed(client) and "closed"),
        "HAProxy counts the connection, or closes it",
        pause_s=0.01,
    )
    if is_counted == "closed":
        client.close()
        return False
    stack.enter_context(client)
    return True


def _counts(proxy: Proxy) -> dict[str, int]:
    """Return how many connections HAProxy counts of each IPv4 address."""
    entries = re.findall(r"key=::ffff:(\S+) .*conn_cur=(\d+)", proxy.command("show table http_frontend"))
    return {address: int(count) for address, count in entries}


def _is_closed(client: socket.socket) -> bool:
    if not select.select([client], [], [], 0)[0]:
        return False
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def wait_until_arrived(sender: socket.socket) -> None:
    """Wait until the kernel at the other end has all that was sent, its end included."""
    until(lambda: _num_unread(sender)[0] == 0, "everything has arrived", pause_s=0.005)


def wait_until_read(sender: socket.socket) -> None:
    """Wait until the process at the other end has read all that was sent."""
    until(lambda: _num_unread(sender) == (0, 0), "the other process has read everything", pause_s=0.005)


def _num_unread(sender: socket.socket) -> tuple[int, int]:
    """Return how many bytes of what was sent are on the way, and how many have arrived and are not read."""
    try:
        own, other = sender.getsockname(), sender.getpeername()
    except OSError:  # both sides have closed the connection
        return 0, 0
    return _queued(own, other)[0], _queued(other, own)[1]


def _queued(own: tuple[str, int], other: tuple[str, int]) -> tuple[int, int]:
    """Return how many bytes the kernel has at one end of an IPv4 connection: sent and on the way; arrived and not read.

    The end of what is sent counts as one. A connection that is closed has none.
    """
    names = [f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (own, other)]
    for line in Path("/proc/net/tcp").read_text().splitlines():
        fields = line.split()
        if fields[1:3] == names:
            on_the_way, arrived = fields[4].split(":")
            return int(on_the_way, 16), int(arrived, 16)
    return 0, 0


def is_answered(url: str) -> bool:
    """Return whether a request is answered with 200; HAProxy sends none to a server that failed its health check."""
    return httpx.get(url, timeout=HANG_S).status_code == 200


def without_pause(exchange: Callable[[], Result], expected: Result, within_s: float) -> Result:
    """Return the result of an exchange; it is repeated if a pause of the machine may be why it is not the expected one.

    Args:
        within_s: how long HAProxy waits for its peers.
    """
    for _ in range(MAX_PAUSES):
        started = time.monotonic()
        result = exchange()
        if result == expected or time.monotonic() - started < within_s:
            return result
    return result


@contextmanager
def running(directory: Path, *ingresses: int, **options: Any) -> Iterator[Proxy]:
    """Run a HAProxy for ingresses at these ports; the options are those of Proxy and ``write_config``."""
    proxy = Proxy(directory, *ingresses, **options)
    try:
        until(lambda: _has_started(proxy), "HAProxy accepts connections", pause_s=0.02)
        yield proxy
    finally:
        proxy.process.send_signal(signal.SIGKILL)
        proxy.process.wait()


def _has_started(proxy: Proxy) -> bool:
    assert proxy.process.poll() is None
    return proxy.socket.exists() and _accepts(proxy) and _has_checked(proxy)


def _has_checked(proxy: Proxy) -> bool:
    """Return whether each server's health has been checked; until then HAProxy may take it for ready or not."""
    try:
        answer = proxy.command("show stat")
    except OSError:  # the socket has a name, and nobody listens there yet
        return False
    rows = list(csv.DictReader(answer.removeprefix("# ").splitlines()))
    return bool(rows) and not any(row["check_status"].endswith("INI") for row in rows)


def _accepts(proxy: Proxy) -> bool:
    try:
        proxy.connect(proxy.host).close()
    except OSError:
        return False
    return True
