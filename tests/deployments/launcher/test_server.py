"""Server without a child process: its start on a machine that has no directory for it, and Server.drain."""

from __future__ import annotations

import errno
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from deployments.launcher import server as server_module
from deployments.launcher.preflight import Endpoint
from deployments.launcher.server import LaunchError, Server

RUNNING: dict[str, Any] = {"applications": {"pagoda": {"status": "DELETING"}}}


def _replicas(**states: str) -> dict[str, Any]:
    """Return Serve's details with replicas in these states; those that start have no node yet."""
    replicas = [
        {"replica_id": name, "state": state, "node_id": None if state == "STARTING" else "node"}
        for name, state in states.items()
    ]
    return {"applications": {"pagoda": {"deployments": {"engine": {"replicas": replicas}}}}}


EMPTY: dict[str, Any] = {"applications": {}}


class Child:
    """`serve run`, which does not end."""

    def poll(self) -> int | None:
        return None


def _num_polls_of_drain(monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]]) -> int:
    """Drain a server whose dashboard gives these answers, then repeats the last one; return how many it gave."""
    polled: list[str] = []

    def details(dashboard: str) -> dict[str, Any]:
        polled.append(dashboard)
        return answers[min(len(polled), len(answers)) - 1]

    monkeypatch.setattr(server_module, "POLL_S", 0.0)
    monkeypatch.setattr(server_module, "delete_applications", lambda dashboard: True)
    monkeypatch.setattr(server_module, "serve_details", details)
    server = Server.__new__(Server)
    server._process = Child()  # type: ignore[assignment]
    server._stop_at_once = Event()
    server._dashboard, server._is_ready = "http://127.0.0.1:8265", True
    server.drain()
    return len(polled)


def test_a_machine_without_a_directory_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_directory() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(server_module, "temporary_directory", no_directory)
    with pytest.raises(LaunchError, match=r"/tmp cannot hold the server's files \(Permission denied\); make it"):
        Server(Path("config.yaml"), Endpoint("127.0.0.1", 8000, "/", "m"), Event())


def test_a_user_who_cannot_run_serve_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even root can run what no one may execute."""
    (tmp_path / "serve").write_text("#!/bin/sh\n")
    monkeypatch.setattr(server_module.shutil, "which", lambda *_, **__: str(tmp_path / "serve"))
    with pytest.raises(
        LaunchError, match=r"serve cannot be run \(Permission denied\); let user \d+ read and execute it"
    ):
        Server(Path("config.yaml"), Endpoint("127.0.0.1", 8000, "/", "m"), Event())


def test_drain_goes_on_while_the_dashboard_is_too_busy_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _num_polls_of_drain(monkeypatch, [RUNNING, RUNNING, {}, {}, RUNNING, {}, EMPTY]) == 7


def test_drain_ends_when_the_dashboard_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _num_polls_of_drain(monkeypatch, [RUNNING, RUNNING, {}]) == 2 + server_module.MAX_UNANSWERED


def test_drain_waits_for_the_replicas_that_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for room may start when another one ends, and Serve lists none meanwhile."""
    alive = iter([True, True, False])
    monkeypatch.setattr(server_module, "replica_processes", lambda: ["a"])
    monkeypatch.setattr(server_module, "is_alive", lambda process: next(alive))
    assert _num_polls_of_drain(monkeypatch, [_replicas(a="RUNNING", b="STARTING"), RUNNING]) == 4


def test_drain_waits_for_replicas_that_have_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _num_polls_of_drain(monkeypatch, [_replicas(a="RUNNING"), _replicas(a="STOPPING"), RUNNING, EMPTY]) == 4
