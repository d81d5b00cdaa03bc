"""README.md and docs/: requests and clients against the running server; log lines and `make status` as described."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.documents import DOCUMENTS, ROOT, CodeBlock, code_blocks, shell_lines, uses_server
from tests.e2e.server import Server
from tests.waiting import HANG_S, until

SHIPPED_URL = "http://127.0.0.1:8000"
REQUESTS = [
    (block, line)
    for page in DOCUMENTS
    for block in code_blocks(page, "bash")
    for line in shell_lines(block)
    if line.startswith("curl")
]


def send(server: Server, line: str) -> str:
    """Run a documented curl command against this server; return what it prints."""
    assert line.count(SHIPPED_URL) == 1
    words = shlex.split(line.replace(SHIPPED_URL, server.url))
    return subprocess.run([*words, "--silent", "--show-error"], capture_output=True, text=True, check=True).stdout


def response_after(block: CodeBlock) -> Any:
    """Return the JSON that the page shows directly after a block, or None."""
    blocks = code_blocks(block.document)
    following = blocks[blocks.index(block) + 1 :]
    return json.loads(following[0].text) if following and following[0].language == "json" else None


@pytest.mark.parametrize(("block", "line"), REQUESTS, ids=[str(block) for block, _ in REQUESTS])
def test_a_request_is_answered(server: Server, block: CodeBlock, line: str) -> None:
    answer = send(server, line)
    shown = response_after(block)
    if shown is not None:
        assert json.loads(answer) == shown
    elif '"stream": true' in line:
        events = [event.removeprefix("data: ") for event in answer.split("\n\n") if event.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert len(events) >= 3  # tokens that come together share an event
        assert not any("error" in json.loads(event) for event in events[:-1])
    else:
        assert "error" not in json.loads(answer), answer


def test_the_requests_are_found() -> None:
    assert len(REQUESTS) >= 4
    assert any(response_after(block) for block, _ in REQUESTS)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_clients_work(server: Server, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    blocks = [block for block in code_blocks(page, "python") if uses_server(block)]
    for block in blocks:
        exec(compile(block.text.replace(SHIPPED_URL, server.url), str(block), "exec"), namespace)
    printed = capsys.readouterr().out
    assert bool(printed) == bool(blocks)
    if page.name == "README.md":
        first, second = (numbers(line) for line in printed.splitlines())
        assert second[0] >= first[1] // 16 * 16 >= 16  # the full blocks of the first prompt, at least


def numbers(line: str) -> tuple[int, int]:
    """Return the numbers of cached tokens and of prompt tokens that the README's client prints."""
    match = re.search(r"\((\d+) of (\d+) prompt tokens cached\)$", line)
    assert match, line
    return int(match[1]), int(match[2])


def test_the_log_lines_have_the_fields_of_the_page(server: Server) -> None:
    (example,) = code_blocks(ROOT / "docs/operations.md", "text")
    request, stats = re.split(r"\n(?=INFO)", " ".join(re.split(r"\n +", example.text)).strip())
    started = len(server.log.read_text())
    body = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S).raise_for_status()
    expected = {shape(request), shape(stats)}
    until(lambda: expected <= {*map(shape, server.log.read_text()[started:].splitlines())}, f"lines like {expected}")


def shape(line: str) -> str:
    """Return a log line without its values, and without the trace of a server that has a collector."""
    line = re.sub(r" trace_id=\w+$", "", line)
    line = re.sub(r"^(INFO) \S+ \S+ (\w+) \w+ --", r"\1 \2 --", line)
    return re.sub(r"[\d.]+(?=%| tokens| reqs)", "N", re.sub(r"=\S+", "=", line))


def test_make_status_shows_the_replicas(server: Server) -> None:
    environment: Mapping[str, str] = {**os.environ, "RAY_DASHBOARD_ADDRESS": server.dashboard}
    environment = {name: value for name, value in environment.items() if name != "RAY_AUTH_MODE"}
    command = ["make", "status", f"BIN={Path(sys.executable).parent}"]
    status = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert status.returncode == 0, status.stderr
    assert "pagoda:" in status.stdout
    assert "status: RUNNING" in status.stdout
