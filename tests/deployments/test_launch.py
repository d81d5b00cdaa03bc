"""The launcher's drain, without a server."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from deployments import launch
from deployments.launch import Server

RUNNING: dict[str, Any] = {"applications": {"pagoda": {"status": "DELETING"}}}
EMPTY: dict[str, Any] = {"applications": {}}


class Child:
    """`serve run`, which goes on."""

    def poll(self) -> int | None:
        return None


def _drain(monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]]) -> int:
    """Drain a server whose dashboard answers this, the last one for ever; return how often it was asked."""
    asked: list[str] = []

    def details(dashboard: str) -> dict[str, Any]:
        asked.append(dashboard)
        return answers[min(len(asked), len(answers)) - 1]

    monkeypatch.setattr(launch, "POLL_S", 0.0)
    monkeypatch.setattr(launch, "_told_again", Event())
    monkeypatch.setattr(launch, "deploy_nothing", lambda dashboard: True)
    monkeypatch.setattr(launch, "serve_details", details)
    server = Server.__new__(Server)
    server._process = Child()  # type: ignore[assignment]
    server._dashboard, server._is_ready = "http://127.0.0.1:8265", True
    server.drain()
    return len(asked)


def test_a_dashboard_that_is_too_busy_to_answer_cuts_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _drain(monkeypatch, [RUNNING, {}, {}, RUNNING, {}, EMPTY]) == 6


def test_a_dashboard_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _drain(monkeypatch, [RUNNING, {}]) == 1 + launch.MAX_UNANSWERED
