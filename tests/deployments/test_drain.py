"""deployments.drain: against a fake dashboard and a fake `ray` that logs its arguments."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import drain

OWN, OTHER = "10.0.0.1", "10.0.0.2"


def _details(*replica_ips: str, proxy_ips: tuple[str, ...] = ()) -> dict[str, Any]:
    replicas = [{"node_id": f"node-{ip}", "node_ip": ip, "state": "RUNNING"} for ip in replica_ips]
    proxies = {f"node-{ip}": {"node_id": f"node-{ip}", "node_ip": ip} for ip in proxy_ips}
    return {"proxies": proxies, "applications": {"pagoda": {"deployments": {"engine": {"replicas": replicas}}}}}


@pytest.fixture
def dashboard() -> Iterator[Callable[[list[dict[str, Any] | None]], str]]:
    """Return a function that starts a server which gives these answers, then repeats the last; None is a 503."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: list[dict[str, Any] | None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                body = json.dumps(answer).encode()
                self.send_response(200 if answer is not None else 503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ray_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a function that starts a server with these answers; the last one repeats, None is a 503."""
    log = tmp_path / "ray.log"
    program = tmp_path / "ray"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\ntest ! -e {tmp_path}/refuse || {{ echo no >&2; exit 1; }}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    for name, value in (("FQ_RAY_IP", "head"), ("POD_IP", OWN), ("RAY_ADDRESS", "head:6379")):
        monkeypatch.setenv(name, value)
    return log


def test_it_announces_the_node_once_and_waits_for_replicas_and_proxy(
    dashboard: Callable[..., str], ray_log: Path
) -> None:
    answers = [_details(OWN, OTHER, proxy_ips=(OWN,))] * 3 + [_details(OTHER, proxy_ips=(OWN,)), _details(OTHER)]
    url = dashboard(answers)
    assert drain.main(["--dashboard", url, "--seconds", "600"]) == 0
    assert answers == [_details(OTHER)]  # it polled until the node served nothing, and no longer
    (call,) = ray_log.read_text().splitlines()
    assert call.startswith(f"drain-node --address head:6379 --node-id node-{OWN} --reason {drain.REASON}")
    assert call.endswith("--deadline-remaining-seconds 600")


def test_a_node_that_serves_nothing_is_drained_at_once(dashboard: Callable[..., str], ray_log: Path) -> None:
    url = dashboard([_details(OTHER, proxy_ips=(OTHER,))])
    assert drain.main(["--dashboard", url]) == 0
    assert not ray_log.exists()


@pytest.mark.parametrize(("head", "url"), [("fd00::2", "http://[fd00::2]:8265"), ("head", "http://head:8265")])
def test_the_head_may_have_an_address_of_ipv6(
    ray_log: Path, monkeypatch: pytest.MonkeyPatch, head: str, url: str
) -> None:
    asked: list[str] = []
    monkeypatch.setenv("FQ_RAY_IP", head)
    monkeypatch.setattr(drain, "serve_details", lambda dashboard: asked.append(dashboard) or _details(OTHER))
    assert drain.main([]) == 0
    assert asked == [url]


def test_it_ends_at_the_deadline(dashboard: Callable[..., str], ray_log: Path) -> None:
    url = dashboard([_details(OWN)])
    assert drain.main(["--dashboard", url, "--seconds", "1"]) == 0
    assert len(ray_log.read_text().splitlines()) == 1


def test_drain_waits_for_a_head_that_restarts_but_not_for_one_that_is_gone(
    dashboard: Callable[..., str], ray_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = dashboard([None, None, _details(OWN), _details(OTHER)])
    assert drain.main(["--dashboard", url]) == 0
    assert len(ray_log.read_text().splitlines()) == 1
    monkeypatch.setattr(drain, "UNANSWERED_S", 0.1)
    url = dashboard([None])
    assert drain.main(["--dashboard", url]) == 0


def test_a_failed_announcement_is_printed_and_repeated(
    dashboard: Callable[..., str], ray_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ray_log.parent / "refuse").touch()
    assert drain.main(["--dashboard", dashboard([_details(OWN), _details(OWN), _details(OTHER)])]) == 0
    assert capsys.readouterr().err == 2 * f"pagoda: Ray does not drain node node-{OWN}: no\n"


@pytest.mark.usefixtures("ray_log")
def test_a_missing_environment_variable_is_named(
    dashboard: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("POD_IP")
    assert drain.main(["--dashboard", dashboard([_details(OWN)])]) == 1
    assert "POD_IP is not set" in capsys.readouterr().err


def test_a_repeated_announcement_gives_the_time_that_is_left(
    dashboard: Callable[..., str], ray_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, refuse = 1000.0, ray_log.parent / "refuse"

    def sleep(_: float) -> None:
        nonlocal now
        now += 10.0
        refuse.unlink(missing_ok=True)

    refuse.touch()
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert drain.main(["--dashboard", dashboard([_details(OWN), _details(OWN), _details(OTHER)])]) == 0
    assert [call.split()[-1] for call in ray_log.read_text().splitlines()] == ["660", "650"]
