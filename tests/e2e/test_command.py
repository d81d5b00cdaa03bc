"""The command `pagoda` in a pseudo-terminal: what its clients show of a real server, and the start of one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.deployments.cli.terminal import Terminal, run, unwrapped
from tests.e2e.server import Server
from tests.ports import free_port

# A network of its own, whose only interface is the loopback: what asks for a name or another host fails at once.
ALONE = ("unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def test_doctor_asks_a_running_server(server: Server) -> None:
    code, text = run("doctor", server.url)
    assert code == 0, text
    assert re.search(r"ok +request +one token after \d+ of prompt in \d+ ms", text), text
    assert "tokens of context, 1024 KV blocks of one engine, 16 tokens each" in unwrapped(text)


def test_top_shows_the_replicas_and_the_last_requests(server: Server) -> None:
    body = {"model": "pagoda-demo", "prompt": list(range(10, 74)), "max_tokens": 2}
    for _ in range(2):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    code, text = run("top", server.url, "--once")
    assert code == 0, text
    for replica in server.engine_pids():
        assert re.search(rf"\n{replica} .* of 1,024", text), text
    assert re.search(r"64 +64 +\d+\S* m?s +holds the most of its prompt", text), text


def test_bench_measures_what_the_server_counts(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--prefixes", "2", "--prefix-tokens", "64", "--turns", "2"]
    options += ["--prompt-tokens", "16", "--output-tokens", "8"]
    before = server.total("pagoda_generation_tokens_total")
    code, text = run("bench", server.url, "--requests", "6", "--concurrency", "2", *options, "--out", str(out))
    assert code == 0, text
    result = json.loads(out.read_text())
    assert (result["requests"], result["complete"], result["output_tokens"]) == (12, 12, 96)
    assert server.total("pagoda_generation_tokens_total") - before == 96
    assert result["prompt_tokens"] == 6 * (80 + 80 + 8 + 16)
    assert result["hit_rate"] > 0.3  # a second turn finds the first one, and most first turns a prefix


def test_chat_shows_the_cached_tokens_of_the_second_answer(server: Server) -> None:
    with Terminal("chat", server.url, "--temperature", "0", "--max-tokens", "40") as terminal:
        at = terminal.wait_for("you> ")
        for question in ("What is a KV cache?", "Can you give an example?"):
            terminal.type(f"{question}\r")
            at = terminal.wait_for("prompt tokens cached)", after=at)
            at = terminal.wait_for("you> ", after=at)
        terminal.type("/quit\r")
        assert terminal.wait() == 0
    [second] = re.findall(r"(\d+) of \d+ prompt tokens cached", terminal.text)[1:]
    assert int(second) > 0


@pytest.mark.long
def test_serve_starts_from_an_empty_directory_without_a_network(tmp_path: Path) -> None:
    """Nothing that a server needs at its start looks anything up, and a folder called as ours shadows nothing."""
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs `unshare --net` and `ip`")
    (tmp_path / "empty/engine").mkdir(parents=True)
    (tmp_path / "empty/engine/__init__.py").write_text("raise RuntimeError('not this one')\n")
    script = tmp_path / "pagoda"  # as the console script: the working directory is not on its path
    script.write_text("from deployments.cli.main import main\nmain()\n")
    command = (*ALONE, "env", "-u", "HF_HUB_OFFLINE", sys.executable, str(script))
    options = ("--set", f"http_options.port={free_port()}")
    with Terminal("serve", "demo", *options, cwd=tmp_path / "empty", command=command) as terminal:
        terminal.wait_for("pagoda: ready after")
        assert re.search(r"warm-up +━+ 2 of 2", terminal.text), terminal.text
        terminal.interrupt()
        terminal.wait_for("pagoda: stopped")
        assert terminal.wait() == 0
