"""`make serve` in environments that have stopped other servers: it serves, whoever runs it and wherever.

A server is started for conditions that cannot hide each other. What a machine cannot do is skipped, and named.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.launcher.preflight import Endpoint
from tests.e2e.server import Server, end_server, start_server
from tests.waiting import HANG_S, until

USER = 12345  # which has no entry in the password database
ASKED = {
    "messages": [{"role": "user", "content": "What is a KV cache? Antworte auf Färöisch, bitte 🙂"}],
    "max_tokens": 8,
}
RUNS_ITSELF = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import yaml'], check=True)"
# A request to a proxy for one of our processes. Others are there: Ray asks the services of clouds where it runs.
OWN_HOST = re.compile(rb"\w+ (https?://)?(127\.|localhost|\[::1\])")
CPU_V1, CPU_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")

pytestmark = [pytest.mark.exhaustive("starts a cluster for each test"), pytest.mark.timeout(900)]


def as_stranger() -> list[str]:
    """Return a command that runs another one under user id 12345.

    Where that user cannot read Python, it gets the right to read everything, and no other one.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can run a server under another user id, with setpriv")
    plain = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    reading = [f"--{kind}=-all,+dac_read_search" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    for prefix in (plain, [*plain, *reading]):
        probe = subprocess.run([*prefix, sys.executable, "-c", RUNS_ITSELF], capture_output=True, check=False)
        if probe.returncode == 0:
            return prefix
    pytest.skip(f"user id {USER} cannot run {sys.executable}")


def one_engine(args: dict[str, Any]) -> None:
    args["replicas"].update(num_engine_replicas=1)


@contextmanager
def silent_proxy() -> Iterator[tuple[str, list[socket.socket]]]:
    """Yield the URL of a proxy that accepts connections and never answers, and the connections that it got."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    connections.append(listener.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)
    for connection in connections:
        connection.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of user 12345 with a short name: for the config, the log, and all temporary files."""
    path = Path(tempfile.mkdtemp(prefix="pg"))
    if os.geteuid() == 0:
        os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def check_answers(server: Server, host: str) -> None:
    """Wait for the server, and check what a client gets from it, whole and streamed."""
    server.wait_until_ready()
    url = Endpoint(host, server.port, "/", "m").url
    assert f"on {url}/v1" in server.log.read_text(encoding="utf-8")
    with httpx.Client(base_url=url, trust_env=False, timeout=HANG_S) as client:
        whole = client.post("/v1/chat/completions", json=ASKED)
        assert whole.status_code == 200, whole.text
        assert whole.json()["choices"][0]["message"]["content"]
        streamed = client.post("/v1/chat/completions", json=ASKED | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert client.get("/health").status_code == 200


def test_a_stranger_without_home_behind_a_silent_proxy(directory: Path) -> None:
    """Any user id, no HOME, an ASCII locale, a proxy that never answers, and the address ``::1``."""
    prefix = as_stranger()
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with silent_proxy() as (proxy, connections):
        names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        environment: dict[str, str | None] = {
            **{name: proxy for lower in names for name in (lower, lower.upper())},
            **dict.fromkeys(("no_proxy", "NO_PROXY", "HOME", "XDG_CACHE_HOME", "PAGODA_CACHE_DIR")),
            **dict.fromkeys(("LANG", "LC_CTYPE", "PYTHONIOENCODING")),
            "LC_ALL": "POSIX",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "TMPDIR": str(directory),
            "PYTHONDONTWRITEBYTECODE": "1",  # the checkout belongs to another user
        }
        server = start_server(directory, directory, one_engine, environment, "::1", prefix)
        try:
            check_answers(server, "::1")
            assert {process.uids().effective for process in server.processes()} == {USER}
            own = [request for request in _requests(connections) if OWN_HOST.match(request)]
            assert not own, "own processes were asked through the proxy"
        finally:
            end_server(server)


def _requests(connections: list[socket.socket]) -> list[bytes]:
    """Return the start of what was sent on each connection."""
    for connection in connections:
        connection.setblocking(False)
    return [connection.recv(200) for connection in connections]


@contextmanager
def half_a_cpu() -> Iterator[Path]:
    """Yield a control group whose processes may use half a CPU on average."""
    is_v1 = CPU_V1.is_dir()
    group = (CPU_V1 if is_v1 else CPU_V2) / f"pagoda-{os.getpid()}"
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"} if is_v1 else {"cpu.max": "50000 100000"}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for file, value in quota.items():
            (group / file).write_text(value)
    except OSError as error:
        group.rmdir()
        pytest.skip(f"the CPUs of a control group cannot be limited here: {error}")
    try:
        yield group
    finally:
        until(lambda: _is_removed(group), "the control group is empty and removed")


def _is_removed(group: Path) -> bool:
    with suppress(OSError):  # some process is not yet reaped
        group.rmdir()
    return not group.exists()


def test_half_a_cpu_at_an_own_address(tmp_path: Path, ray_dir: Path) -> None:
    """It takes minutes, but no timeout of ours or of Ray's ends it."""
    with half_a_cpu() as group:
        server = start_server(tmp_path, ray_dir, one_engine, host="127.0.0.2")
        try:
            (group / "cgroup.procs").write_text(str(server.process.pid))  # before it has started any other
            check_answers(server, "127.0.0.2")
            in_group = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
            assert {process.pid for process in server.processes()} <= in_group
        finally:
            end_server(server)
