"""Fixtures that start the real server as a user does; most end-to-end tests share one."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
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
from contextlib import contextmanager, suppress
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
    from deployments.launcher.stop_signals import SAME_SIGNAL_S

import psutil

from tests.deployments.collector import Collector, collecting

pytest.register_assert_rewrite("tests.e2e.browser")  # whose assertion would not say which requests failed

ROOT = Path(__file__).resolve().parents[2]
SHARED_SERVERS = ("small_server", "public_server", "server")  # in the order in which they run
MAX_RUNNING, MAX_WAITING, TIMEOUT_S = 2, 3, 15.0  # of the requests to the small server
assert ray.__file__


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of a shared server together, and last those that stop it, so that no two servers run beside."""
    items.sort(key=_order)


def _order(item: pytest.Item) -> tuple[int, bool]:
    if Path(__file__).parent not in item.path.parents:
        return (-1, False)
    servers = [SHARED_SERVERS.index(name) for name in getattr(item, "fixturenames", ()) if name in SHARED_SERVERS]
    return (max(servers, default=-1), item.get_closest_marker("stops_server") is not None)


def free_port() -> int:
    """Return a free TCP port, below those that systems give to clients: one of them might take it before the server."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def write_config(
    path: Path, port: int, change: Callable[[dict[str, Any]], object] = lambda args: None, host: str = "127.0.0.1"
) -> Path:
    """Write the shipped config with another port, after applying ``change`` to the application's arguments."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"].update(host=host, port=port)
    args = document["applications"][0]["args"]
    args["model"] = os.environ.get("PAGODA_TEST_MODEL", args["model"])
    change(args)
    if os.environ.get("PAGODA_TEST_ASYNC_SCHEDULING"):  # overlap steps on a CPU too, as a GPU does
        args["engine"] = {**(args.get("engine") or {}), "async_scheduling": True}
    path.write_text(yaml.safe_dump(document))
    return path


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def by_replica(samples: Samples, name: str, **labels: str) -> dict[str, float]:
    """Return one metric of ``Server.metrics`` by engine replica, summed over all other labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for (found, pairs), value in samples.items():
        if found == name and pairs.issuperset(labels.items()):
            sums[dict(pairs).get("replica", "")] += value
    return dict(sums)


@dataclasses.dataclass
class Server:
    """A running `python -m deployments.launch`."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    ray_dir: Path
    ready_s: float = 0.0
    key: str = ""  # one of its API keys; empty if it requires none

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request needs."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

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

    def metrics(self) -> Samples:
        """Return every sample of /metrics by name and labels."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=20).raise_for_status().text
        families = text_string_to_metric_families(text)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Return one metric by engine replica, summed over all other labels."""
        return by_replica(self.metrics(), name, **labels)

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

    def stop_at_once(self) -> None:
        """Interrupt the launcher twice, so that it waits neither for streams nor for Ray."""
        for _ in range(2):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=2 * SAME_SIGNAL_S)
        self.process.wait(timeout=60)


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
    host: str = "127.0.0.1",
) -> Server:
    """Start a server on a free port; the caller must end it."""
    port = free_port()
    config = write_config(directory / "config.yaml", port, change, host)
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
        server.stop_at_once()
    finally:
        for process in alive(processes):
            process.kill()


@contextmanager
def running_server(
    directory: Path,
    change: Callable[[dict[str, Any]], object] = lambda args: None,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Iterator[Server]:
    """Run a server inside the ``with`` block."""
    ray_dir = Path(tempfile.mkdtemp(prefix="pg"))
    running = start_server(directory, ray_dir, change, environment, host)
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


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for two running and three waiting requests, and a timeout of 15 s."""

    def change(args: dict[str, Any]) -> None:
        args["replicas"]["num_engine_replicas"] = 1
        args["engine"]["max_num_seqs"] = MAX_RUNNING
        args["limits"] |= {"max_queued_requests_per_engine": MAX_WAITING, "request_timeout_s": TIMEOUT_S}

    with running_server(tmp_path_factory.mktemp("small"), change) as running:
        yield running


@pytest.fixture(scope="session")
def public_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that long tests share, as it is run for other machines: on all addresses, with an API key.

    It has two engines in float32 and two ingresses.
    """

    def change(args: dict[str, Any]) -> None:
        args["engine"]["dtype"] = "float32"
        args["replicas"]["num_ingress_replicas"] = 2

    directory, key = tmp_path_factory.mktemp("public"), "a-key-of-the-tests"
    keys = directory / "keys"
    keys.write_text(f"{key}\n")
    environment = {"PAGODA_API_KEYS_FILE": str(keys)}
    with running_server(directory, change, environment=environment, host="0.0.0.0") as running:
        running.key = key
        yield running
