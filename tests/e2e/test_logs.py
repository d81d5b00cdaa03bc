"""What a server writes into its logs when clients make mistakes that only an engine finds."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.waiting import until

SECRET = "Kryptonite"  # of the client; no log may hold it
MISTAKES: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"grammar": f'root ::= "{SECRET}" ('}},
    "regex": {"structured_outputs": {"regex": f"{SECRET}[("}},
    "schema": {"structured_outputs": {"json": {"type": "string", "pattern": f"{SECRET}(("}}},
    "type": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": SECRET}}}},
    "salt": {"cache_salt": SECRET * 20},
}


def _logs(server: Server) -> dict[Path, str]:
    """Return every log file of Ray and Serve, and what the terminal shows."""
    files = [path for path in (server.ray_dir / "ray/session_latest/logs").rglob("*") if path.is_file()]
    return {path: path.read_text(errors="replace") for path in [*files, server.log]}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_without_the_clients_text(server: Server, client: httpx.Client, mistake: str) -> None:
    request_id = f"mistake-{mistake}-{uuid.uuid4().hex}"
    body = {"prompt": f"{SECRET} is", "max_tokens": 3, **MISTAKES[mistake]}
    tracebacks = sum(text.count("Traceback") for text in _logs(server).values())
    answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
    assert answer.status_code == 400
    (line,) = until(lambda: _lines_about(server, request_id), f"a line about {request_id}")
    assert line.startswith("INFO")
    assert "status=400" in line
    logs = _logs(server)
    assert [path for path, text in logs.items() if SECRET in text] == []
    assert sum(text.count("Traceback") for text in logs.values()) == tracebacks


def _lines_about(server: Server, request_id: str) -> list[str]:
    """Return the lines about a request in Ray's and Serve's files; the terminal repeats them."""
    logs = {path: text for path, text in _logs(server).items() if path != server.log}
    return [line for text in logs.values() for line in text.splitlines() if request_id in line]
