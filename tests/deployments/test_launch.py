"""The launcher's end when the server does not start: one line and an exit code. A script stands for `serve run`."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments import launch
from deployments.launcher import server as server_module
from deployments.launcher.preflight import Endpoint
from deployments.launcher.processes import descendants
from deployments.launcher.progress import StartProgress
from deployments.launcher.server import Server
from tests.ports import free_port
from tests.waiting import HANG_S, until

REASON = "engine.errors.ConfigError: num_blocks=1 is too few; give at least 2"
FAILED: dict[str, Any] = {
    "applications": {
        "pagoda": {
            "status": "DEPLOYING",
            "deployments": {"engine": {"message": f"The deployment failed to start 1 times in a row.\n{REASON}\n"}},
        }
    }
}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    """The servers that the launcher has made. Of this process's children they end only their own."""
    others, started = set(descendants()), list[Server]()

    def start(*args: Any) -> Server:
        started.append(Server(*args))
        return started[-1]

    monkeypatch.setattr(launch, "Server", start)
    monkeypatch.setattr(server_module, "descendants", lambda: [child for child in descendants() if child not in others])
    yield started
    until(lambda: not any("_print_output" in thread.name for thread in threading.enumerate()), "all output is read")
    for server in started:
        with server._process:
            server._process.kill()


@pytest.mark.parametrize(
    ("script", "details", "line", "end"),
    [
        ("exec sleep 1000", FAILED, f"pagoda: application 'pagoda' failed: {REASON}", -signal.SIGTERM),
        ("exit 3", {}, "pagoda: serve run ended with exit code 3; its output is above", 3),
    ],
    ids=["an engine that cannot start", "serve run ends"],
)
def test_a_server_that_does_not_start_ends_the_launcher(
    script: str,
    details: dict[str, Any],
    line: str,
    end: int,
    servers: list[Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    serve = tmp_path / "serve"
    serve.write_text(f"#!/bin/sh\n{script}\n")
    serve.chmod(0o755)
    monkeypatch.setattr(server_module.shutil, "which", lambda *_, **__: str(serve))
    monkeypatch.setattr(server_module, "serve_details", lambda dashboard: details)
    endpoint = Endpoint("127.0.0.1", free_port(), "/", "m")
    assert launch._serve(tmp_path / "config.yaml", endpoint, threading.Event(), StartProgress()) == 1
    assert capfd.readouterr().err == f"{line}\n"
    assert servers[0]._process.wait(HANG_S) == end


def test_what_the_terminals_encoding_lacks_is_escaped(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would end the thread that reads the output of `serve run`, which would then wait for ever."""
    serve = tmp_path / "serve"
    serve.write_text("#!/bin/sh\necho 'Größe 模'\necho last\nexec sleep 1000\n", encoding="utf-8")
    serve.chmod(0o755)
    monkeypatch.setattr(server_module.shutil, "which", lambda *_, **__: str(serve))
    monkeypatch.setattr(server_module, "FAILURE_POLL_S", 0.0)
    monkeypatch.setattr(server_module, "serve_details", lambda _: FAILED if b"last\n" in printed.getvalue() else {})
    endpoint = Endpoint("127.0.0.1", free_port(), "/", "模型")
    for name, result in (
        ("check_config", endpoint),
        ("provide_home", None),
        ("install_stop_handlers", threading.Event()),
        ("adopt_orphans", None),
    ):
        monkeypatch.setattr(launch, name, lambda *_, result=result: result)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    assert launch.main(["config.yaml"]) == 1
    assert b"starting \\u6a21\\u578b on " in printed.getvalue()
    assert b"Gr\\xf6\\xdfe \\u6a21\n" in printed.getvalue()
