"""A HAProxy with the changed configuration, and a server after it that stands for the ingress."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx

from deployments.config import checkout_root
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.probe_frontend import PORT_VARIABLE
from tests.ports import free_port
from tests.waiting import HANG_S, until

LIMITS = ProxyLimits(
    max_connections=8, max_connections_per_address=3, header_timeout_s=1.0, keep_alive_timeout_s=1.2, send_timeout_s=1.6
)
PATIENT = replace(LIMITS, header_timeout_s=HANG_S)  # for tests that hold silent connections
CLIENTS = [f"127.0.0.{number}" for number in range(2, 6)]


class Ingress(BaseHTTPRequestHandler):
    """Answers with the headers that it gets."""

    protocol_version = "HTTP/1.1"
    head_arrived = threading.Event()  # set by a client, which then gets the body of /head-first
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
            time.sleep(0.2)
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
        self.head_arrived.wait(10)
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
        self.end_headers()
        if self.path.endswith("/late"):
            time.sleep(0.05)
            self.wfile.flush()
            time.sleep(0.05)
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
        self.host = host
        self.port, self.stats_port, self.metrics_port = free_port(), free_port(), free_port()
        self.socket, self.config = directory / "admin.sock", directory / "haproxy.cfg"
        ports = {"stats_port": self.stats_port, "metrics_port": self.metrics_port}
        write_config(self.config, *ingresses, frontend=self.port, host=host, **options, **ports)
        self.probe_port = free_port()
        environ = os.environ | limits.environment | {PORT_VARIABLE: str(self.probe_port)}
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
        **ports,
    )
    servers = [ServerConfig(f"SERVE_REPLICA-app-ingress-{port}", "127.0.0.1", port) for port in ingresses]
    last = ServerConfig("SERVE_PROXY_ACTOR-fallback", "127.0.0.1", fallback) if fallback is not None else None
    backend = BackendConfig("http-app", "/", app_name="app", servers=servers, fallback_server=last)
    HAProxyApi(config, {"http-app": backend}, str(path))._generate_config_file_internal()


def hold(stack: ExitStack, proxy: Proxy, address: str, count: int) -> None:
    """Open so many connections, and keep those that are accepted until the end of the ``stack``."""
    for _ in range(count):
        with suppress(ConnectionError):
            stack.enter_context(proxy.connect(address))
        time.sleep(0.02)  # its threads count connections that come at once, and reject all of them


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
    return proxy.socket.exists() and _accepts(proxy)


def _accepts(proxy: Proxy) -> bool:
    try:
        proxy.connect(proxy.host).close()
    except OSError:
        return False
    return True
