"""The real server as a process, started as a user starts it, and what it says about itself."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from tests.ports import free_port
from tests.waiting import HANG_S, until, until_async

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[dict[str, Any]], object]
# On a busy machine Ray would take a proxy for dead that starts or answers slowly, and kill it.
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
SERVER_NICENESS = 3  # of a server's sessions; 1 already makes the difference
START_HANG_S = 240.0  # below the limit of a test, whose message would not show the log
assert ray.__file__


def write_config(path: Path, port: int, change: Change = lambda args: None, host: str = "127.0.0.1") -> Path:
    """Write the shipped config with another port, after applying ``change`` to the application's arguments."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"].update(host=host, port=port)
    args = document["applications"][0]["args"]
    args["model"] = os.environ.get("PAGODA_TEST_MODEL", args["model"])
    change(args)
    path.write_text(yaml.safe_dump(document))
    return path


NAMED_BY = {"replica": "pagoda_engine_start_time_seconds", "ingress": "pagoda_replicas"}  # metrics that each reports
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def by_replica(samples: Samples, name: str, **labels: str) -> dict[str, float]:
    """Return one metric of ``Server.metrics`` by engine replica, summed over all other labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for (sample, pairs), value in samples.items():
        if sample == name and pairs.issuperset(labels.items()):
            sums[dict(pairs).get("replica", "")] += value
    return dict(sums)


@dataclasses.dataclass
class Server:
    """A running `python -m deployments.launch`."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    ray_dir: Path
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
        urls: list[str] = re.findall(r"dashboard at .*?(https?://[\d.]+:\d+)", self.log.read_text())
        return urls[-1]

    def wait_until_ready(self) -> None:
        """Wait until the launcher says that the server is ready."""
        self.wait_for_line("pagoda: ready")
        self._yield_to_clients()

    def _yield_to_clients(self) -> None:
        """Let the test's own process run before the server's, which are in other sessions.

        An engine's niceness counts within its session only (see sched(7), autogroup). Without this, the kernel left a
        test that reads streams without a core for up to ten seconds, and all streams had ended before it read one.
        """
        for process in self.processes():
            with suppress(OSError):  # it has ended, or the kernel has no autogroups
                Path(f"/proc/{process.pid}/autogroup").write_text(str(SERVER_NICENESS))

    def wait_for_line(self, text: str, *, start: int = 0) -> str:
        """Wait for a line with ``text`` in the launcher's output after ``start`` characters, and return it."""

        def line() -> str | None:
            log = self.log.read_text()
            if line := next((line for line in log[start:].splitlines() if text in line), None):
                return line
            assert self.process.poll() is None, f"the launcher has ended; its log:\n{log}"
            return None

        return str(until(line, f"a line with {text!r}", hang_s=START_HANG_S, details=self.log.read_text))

    def wait(self) -> int:
        """Wait until the launcher ends; return its exit code, or fail and show its log."""
        try:
            return self.process.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {HANG_S:g} s; its log:\n{self.log.read_text()}")

    def metrics(self) -> Samples:
        """Return every sample of /metrics by name and labels."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=HANG_S).raise_for_status().text
        families = text_string_to_metric_families(text)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def metrics_of_all(self) -> Samples:
        """Return the same once all running replicas have answered: one that takes two seconds is left out."""

        def samples() -> Samples | None:
            running = self.pids("engine").keys() | self.pids("ingress").keys()
            reported = self.metrics()
            named = {dict(labels).get(kind) for name, labels in reported for kind in NAMED_BY if name == NAMED_BY[kind]}
            return reported if named >= running else None

        return until(samples, "all replicas report their metrics") or {}

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """Return one metric by engine replica, summed over all other labels."""
        return by_replica(self.metrics(), name, **labels)

    def total(self, name: str, **labels: str) -> float:
        """Return one metric, summed over all other labels and over the replicas that answer in time."""
        return sum(self.metric(name, **labels).values())

    def num_finished(self, **labels: str) -> float:
        """Return how many requests have left the engines so far, by default for any reason."""
        return sum(by_replica(self.metrics_of_all(), "pagoda_requests_finished_total", **labels).values())

    def usage(self) -> dict[str, float]:
        """Return how many requests run and wait in all engines, and how many KV blocks they use."""
        samples = self.metrics_of_all()
        return {
            "running": sum(by_replica(samples, "pagoda_num_requests_running").values()),
            "waiting": sum(by_replica(samples, "pagoda_num_requests_waiting").values()),
            "blocks": sum(by_replica(samples, "pagoda_kv_blocks", state="used").values()),
        }

    async def until_idle(self) -> None:
        """Wait until no request runs or waits, and all KV blocks are free."""
        await until_async(lambda: not any(self.usage().values()), "nothing is in use", details=self.usage)

    def engine_pids(self) -> dict[str, int]:
        """Return the process id of each engine replica."""
        return self.pids("engine")

    def pids(self, deployment: str) -> dict[str, int]:
        """Return the process id of each running replica of a deployment; empty while Serve applies a new config."""
        details = until(lambda: serve_details(self.dashboard), "Ray's dashboard answers")
        application = details["applications"].get("pagoda", {})
        replicas = application.get("deployments", {}).get(deployment, {}).get("replicas", ())
        return {item["replica_id"]: item["pid"] for item in replicas if item["state"] == "RUNNING"}

    def live_pids(self, deployment: str) -> dict[str, int]:
        """Return the running replicas whose process runs: Serve notices a death a bit later."""
        pids = self.pids(deployment)
        running = {process.pid for process in alive(self.processes())}
        return {replica: pid for replica, pid in pids.items() if pid in running}

    def processes(self) -> list[psutil.Process]:
        """Return the launcher and its descendants."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def variable(self, name: str) -> str:
        """Return an environment variable that the launcher has set for its descendants; some may be ending."""
        for process in self.processes()[1:]:
            with suppress(psutil.Error):
                if value := process.environ().get(name):
                    return value
        raise LookupError(name)

    def stop_at_once(self) -> None:
        """Interrupt the launcher twice, so that it waits neither for streams nor for Ray."""
        for _ in range(2):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=2 * SAME_SIGNAL_S)
        self.process.wait(timeout=HANG_S)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end_with_parent() -> None:
    """Make the kernel terminate the launcher if the test process dies first (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def start_server(
    directory: Path,
    ray_dir: Path,
    change: Change = lambda args: None,
    environment: Mapping[str, str | None] | None = None,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
) -> Server:
    """Start a server on a free port; the caller must end it.

    A variable of ``environment`` that is None is unset. ``prefix`` is a command that runs the launcher.
    """
    port = free_port()
    config = write_config(directory / "config.yaml", port, change, host)
    log = directory / "server.log"
    variables = {**os.environ, "RAY_TMPDIR": str(ray_dir), **PATIENT, **(environment or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "deployments.launch", str(config)],
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
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
    change: Change = lambda args: None,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> Iterator[Server]:
    """Run a server inside the ``with`` block."""
    ray_dir = Path(tempfile.mkdtemp(prefix="pg"))
    running = start_server(directory, ray_dir, change, environment, host)
    try:
        running.wait_until_ready()
        yield running
    finally:
        end_server(running)
        shutil.rmtree(ray_dir, ignore_errors=True)
