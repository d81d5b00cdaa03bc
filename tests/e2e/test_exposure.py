"""docs/exposure.md lists everything that a server listens on, and Ray's token protects what it says."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest

from tests.e2e.listeners import FILE, Entry, Listener, differences, documented, listeners, taken_ports
from tests.e2e.server import Server
from tests.waiting import HANG_S, until

ENGINE = "ray::ServeReplica:pagoda:engine"


def _check_listeners(server: Server, host: str) -> None:
    """Wait until the server listens as the page says: some of its processes start after it is ready."""
    entries = documented(server.port, host, server.ray_dir)

    def wrong() -> list[str]:
        return differences(listeners(server.processes()), entries, taken_ports(server.ray_dir, entries))

    until(lambda: not wrong(), "the server listens as documented", pause_s=1.0, details=wrong)


def test_the_page_lists_every_listener(server: Server) -> None:
    _check_listeners(server, "127.0.0.1")


@pytest.mark.long
def test_the_page_lists_every_listener_of_a_server_for_other_machines(public_server: Server) -> None:
    _check_listeners(public_server, "all")


@pytest.fixture
def serves_ports(server: Server) -> list[int]:
    """The gRPC ports of Serve, which are open on all addresses."""
    return [
        listener.socket
        for listener in listeners(server.processes())
        if listener.address == "all" and isinstance(listener.socket, int)
    ]


def test_ports_on_all_addresses_require_rays_token(serves_ports: list[int]) -> None:
    assert len(serves_ports) >= 3  # two engines and an ingress
    for port in serves_ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=HANG_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["/api/serve/applications/", "/api/cluster_status", "/api/jobs/", "/api/v0/actors"])
def test_rays_dashboard_requires_its_token(server: Server, path: str) -> None:
    assert httpx.get(server.dashboard + path, timeout=HANG_S).status_code == 401


def test_differences_are_found() -> None:
    """In both directions, and in ports, addresses and numbers."""
    requests, file = Entry(ENGINE, "random", "127.0.0.1"), Entry("raylet", "/tmp/ray/session_*/sockets/raylet", FILE)
    entries = [requests, requests, file, Entry("haproxy", "20000-31999", "127.0.0.1")]
    engine = [Listener(ENGINE, port, "127.0.0.1", 1) for port in (40001, 40002)]
    other = [Listener(ENGINE, port, "127.0.0.1", 2) for port in (40003, 40004)]
    files = [Listener("raylet", "/tmp/ray/session_1/sockets/raylet", FILE, 3)]
    pages = [Listener("haproxy", 25000, "127.0.0.1", 4)]
    everything = [*engine, *other, *files, *pages]
    assert differences(everything, entries) == []
    for present, problem in [
        ([*engine, *other[:1], *files, *pages], "1 sockets instead of 2 of process 2"),
        ([*everything, Listener(ENGINE, 40005, "127.0.0.1", 2)], "3 sockets instead of 2 of process 2"),
        ([*engine, *pages], "documented, but absent: Entry(process='raylet'"),
        ([*engine, *files], "documented, but absent: Entry(process='haproxy'"),
        ([*everything, Listener(ENGINE, 40005, "all", 1)], "undocumented"),
        ([*everything, Listener("haproxy", 9101, "127.0.0.1", 4)], "undocumented"),
        ([*everything, Listener("raylet", "/tmp/other", FILE, 3)], "undocumented"),
        ([*everything, Listener("sshd", 40005, "127.0.0.1", 5)], "undocumented"),
    ]:
        (line,) = differences(present, entries)
        assert problem in line


def test_a_fixed_port_is_absent_only_if_a_log_says_that_it_was_taken(tmp_path: Path) -> None:
    entries = [Entry("monitor.py", "44217", "127.0.0.1"), Entry("raylet", "random", "127.0.0.1")]
    present = [Listener("raylet", 40001, "127.0.0.1", 1)]
    assert len(differences(present, entries)) == 1
    logs = tmp_path / "ray/session_2026-01-01/logs"
    logs.mkdir(parents=True)
    (logs / "monitor.log").write_text("Starting autoscaler metrics server on port 44217\n")
    (logs / "dashboard.log").write_text("OSError: [Errno 98] Address already in use\n")
    assert taken_ports(tmp_path, entries) == set()
    with (logs / "monitor.log").open("a") as log:
        log.write("OSError: [Errno 98] Address already in use\n")
    assert taken_ports(tmp_path, entries) == {44217}
    assert differences(present, entries, {44217}) == []
    assert len(differences(present[:0], entries, {44217})) == 1
