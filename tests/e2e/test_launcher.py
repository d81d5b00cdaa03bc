"""The launcher as a process: a mistake ends it with one line, a signal ends it and all its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.launcher.preflight import Endpoint
from kernels.cgroup import available_cpus
from tests.e2e.conftest import SMALL_ENGINES
from tests.e2e.server import ROOT, Change, Server, alive, end_server, start_server, write_config
from tests.ports import free_port
from tests.waiting import HANG_S, until


def _launch(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployments.launch", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def _assert_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode != 0
    lines = (result.stdout + result.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda args: args.update(modle="x"), ("'modle'", "'model'")),
        (lambda args: args.update(model="no/such/model"), ("no/such/model", "checkpoint")),
    ],
)
def test_a_mistake_in_the_config(tmp_path: Path, change: Change, parts: tuple[str, ...]) -> None:
    config = write_config(tmp_path / "config.yaml", free_port(), change)
    _assert_one_line(_launch(config), f"pagoda: {config}: ", *parts)


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _assert_one_line(_launch(write_config(tmp_path / "config.yaml", port)), str(port), "taken", "http_options.port")


def test_a_missing_file(tmp_path: Path) -> None:
    _assert_one_line(_launch(tmp_path / "none.yaml"), "none.yaml")


@pytest.mark.exhaustive("starts a cluster of its own; unit tests have the line of the error, and the exit code")
def test_an_engine_that_cannot_start_ends_the_launcher(tmp_path: Path, ray_dir: Path) -> None:
    """An error that only the engine finds is printed in one line too, and ends the launcher."""
    once = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"}  # by default Serve tries three times with pauses

    def change(args: dict[str, Any]) -> None:
        del args["engine"]["kv_cache_memory"]
        args["engine"].update(num_blocks=1, block_size=1)
        args["replicas"]["num_engine_replicas"] = 1

    server = start_server(tmp_path, ray_dir, change, once)
    try:
        assert server.wait() == 1
        last = server.log.read_text().strip().splitlines()
        assert any(line.startswith("pagoda: application 'pagoda' failed") and "num_blocks=1" in line for line in last)
    finally:
        end_server(server)


@pytest.mark.exhaustive("starts a cluster for each host; tests/deployments/proxy/test_listeners.py runs HAProxy alone")
@pytest.mark.parametrize("host", ["127.0.0.2", "::"])  # test_hostile_environments.py has ::1
def test_a_server_at_any_host_of_the_machine(tmp_path: Path, ray_dir: Path, host: str) -> None:
    server = start_server(tmp_path, ray_dir, lambda args: args["replicas"].update(num_engine_replicas=1), host=host)
    try:
        server.wait_until_ready()
        url = Endpoint(host, server.port, "/", "m").url
        assert f"on {url}/v1" in server.log.read_text()
        body = {"prompt": "Once", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S).status_code == 200
    finally:
        end_server(server)


@pytest.mark.long
def test_more_engines_than_fit(small_server: Server) -> None:
    """Those that fit serve, the launcher reports what the others wait for, and nothing waits for them forever."""
    line = small_server.wait_for_line("engine replicas wait for CPU")
    assert f"1 of {SMALL_ENGINES} engine replicas wait for CPU: each needs {0.6 * available_cpus():g}, " in line
    assert "the cluster has " in line
    assert "lower replicas.num_engine_replicas" in line
    assert _health(small_server) == 200
    body = {"prompt": "Once", "max_tokens": 3}
    assert httpx.post(f"{small_server.url}/v1/completions", json=body, timeout=HANG_S).status_code == 200


@pytest.mark.exhaustive("starts a cluster of its own; the checks before a start have unit tests")
def test_an_engine_for_which_no_machine_has_room(tmp_path: Path, ray_dir: Path) -> None:
    def change(args: dict[str, Any]) -> None:
        args["replicas"].update(num_engine_replicas=1, cpus_per_engine=available_cpus() + 1)

    server = start_server(tmp_path, ray_dir, change)
    try:
        server.wait_for_line("1 of 1 engine replicas wait for CPU")
        statuses: list[int] = []
        until(lambda: statuses.append(_health(server)) or statuses[-1] == 503, "the ingress answers")
        assert set(statuses) <= {0, 503}
        answer = httpx.get(f"{server.url}/health", timeout=HANG_S)
        assert "wait for resources" in answer.json()["error"]["message"]
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        end_server(server)


def _health(server: Server) -> int:
    """Return the status of /health; 0 while nothing listens."""
    try:
        return httpx.get(f"{server.url}/health", timeout=HANG_S).status_code
    except httpx.ConnectError:
        return 0


@pytest.mark.long
@pytest.mark.stops_server
def test_an_interrupt_cuts_no_stream_and_leaves_no_process(small_server: Server) -> None:
    _check_stop(small_server, signal.SIGINT)
    assert "Traceback" not in small_server.log.read_text()


@pytest.mark.long
@pytest.mark.stops_server
def test_a_termination_cuts_no_stream_and_leaves_no_process(public_server: Server) -> None:
    _check_stop(public_server, signal.SIGTERM)


def _check_stop(server: Server, number: signal.Signals) -> None:
    """Signal a server with a stream: the stream is sent to its end, and then the server is gone, to its last file."""
    log = server.log.read_text()
    assert server.url in log
    assert "curl -N" in log
    until(lambda: _health(server) == 200, "the server is healthy")
    processes = server.processes()
    assert len(processes) > 5
    temporary = Path(server.variable("TMPDIR"))
    assert list(temporary.glob("pymp-*"))  # of Ray's dashboard
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=server.headers, timeout=HANG_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.killpg(server.process.pid, number)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "data: [DONE]"
    assert server.wait() == 0
    assert alive(processes) == []
    assert not temporary.exists()
    ray_files = str(server.ray_dir / "ray")
    assert [process for process in psutil.process_iter() if _mentions(process, ray_files)] == []


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
