"""Fixtures that start the real server as a user does; most end-to-end tests share one."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    import ray  # also puts psutil on the path
    import ray.serve

    from deployments.launcher.dashboard import serve_details

import psutil

from tests.deployments.collector import Collector, collecting

ROOT = Path(__file__).resolve().parents[2]
assert ray.__file__


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(path: Path, port: int, change: Callable[[dict[str, Any]], object] = lambda args: None) -> Path:
    """Write the shipped config with another port, after applying ``change`` to the application's arguments."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = port
    args = document["applications"][0]["args"]
    args["model"] = os.environ.get("PAGODA_TEST_MODEL", args["model"])
    change(args)
    path.write_text(yaml.safe_dump(document))
    return path


@dataclasses.dataclass
class Server:
    """A running `python -m deployments.launch`."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    ray_dir: Path
    ready_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        """The URL of Ray's dashboard API."""
        found: list[str] = re.findall(r"dashboard at .*?(https?://[\d.]+:\d+)", self.log.read_text())
        return found[-1]

    def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        started = time.monotonic()
        while "pagoda: ready" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - started < timeout_s, self.log.read_text()
            time.sleep(0.1)
        self.ready_s = time.monotonic() - started

    def wait(self, timeout_s: float) -> int:
        """Wait until the launcher ends; return its exit code, or fail and show its log."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s; its log:\n{self.log.read_text()}")

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return every sample of /metrics by name and labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=20).raise_for_status().text
        families = text_string_to_metric_families(text)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Return one metric by engine replica, summed over all other labels."""
        sums: defaultdict[str, float] = defaultdict(float)
        for (found, pairs), value in self.metrics().items():
            if found == name and pairs.issuperset(labels.items()):
                sums[dict(pairs).get("replica", "")] += value
        return dict(sums)

    def engine_pids(self) -> dict[str, int]:
        """Return the process id of each engine replica."""
        return self.pids("engine")

    def pids(self, deployment: str) -> dict[str, int]:
        """Return the process id of each running replica of a deployment; empty while Serve applies a new config."""
        application = serve_details(self.dashboard)["applications"].get("pagoda", {})
        replicas = application.get("deployments", {}).get(deployment, {}).get("replicas", ())
        return {item["replica_id"]: item["pid"] for item in replicas if item["state"] == "RUNNING"}

    def processes(self) -> list[psutil.Process]:
        """Return the launcher and its descendants."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signal the launcher's process group, as a terminal does, and return its exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.process.wait(timeout=60)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run."""
    return [item for item in processes if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]


def _end_with_parent() -> None:
    """Make the kernel terminate the launcher if the test process dies first (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def start_server(
    directory: Path,
    ray_dir: Path,
    change: Callable[[dict[str, Any]], object] = lambda args: None,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start a server on a free port; the caller must end it."""
    port = free_port()
    config = write_config(directory / "config.yaml", port, change)
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.launch", str(config)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(ray_dir), **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    return Server(process, log, port, ray_dir)


def end_server(server: Server) -> None:
    """End a server and all its processes; for fixtures, without assertions."""
    processes = server.processes() if server.process.poll() is None else []
    try:
        server.stop()
    finally:
        for process in alive(processes):
            process.kill()


@contextmanager
def running_server(
    directory: Path,
    change: Callable[[dict[str, Any]], object] = lambda args: None,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server inside the ``with`` block."""
    ray_dir = Path(tempfile.mkdtemp(prefix="pg"))
    running = start_server(directory, ray_dir, change, environment)
    try:
        running.wait_until_ready(timeout_s)
        yield running
    finally:
        end_server(running)
        shutil.rmtree(ray_dir, ignore_errors=True)


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    """A directory for Ray with a short name, because socket paths are limited to 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="pg"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """The collector to which the shared server exports its spans."""
    with collecting() as made:
        yield made


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """The server that most tests share: the shipped config in float32, with bodies of at most 1 MiB, and traced.

    In bfloat16 two tokens often have exactly equal logits, and the batch decides which one is greedy. In float32 texts
    are reproducible.
    """

    def change(args: dict[str, Any]) -> None:
        args["limits"]["max_body_bytes"] = 2**20
        args["engine"]["dtype"] = "float32"

    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with running_server(tmp_path_factory.mktemp("server"), change, environment=traces) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=60) as plain:
        yield plain
