"""The process of tests/e2e/cluster.py, as tests see it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.launcher.dashboard import serve_details
from deployments.launcher.environment import environment
from deployments.proxy.limits import ProxyLimits
from tests.e2e.cluster import REPLY_PREFIX
from tests.e2e.server import ROOT, alive
from tests.ports import free_port
from tests.waiting import HANG_S


class RunningCluster:
    """The process of tests/e2e/cluster.py and its replies."""

    def __init__(self, ray_dir: Path, setting: str) -> None:
        self.port = free_port()
        settings = environment(ProxyLimits(), ray_dir / "proxy") | {
            "RAY_TMPDIR": str(ray_dir),
            "RAY_AUTH_MODE": "disabled",
        }
        settings.pop("RAY_OVERRIDE_RESOURCES")  # of one node, which the launcher starts
        self.log = ray_dir / "cluster.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.cluster", str(self.port), setting],
                cwd=ROOT,
                env=settings,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def read_reply(self) -> dict[str, Any]:
        """Return the next reply."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            _, mark, text = line.partition(REPLY_PREFIX)  # Ray's own processes write to the same line at times
            if mark:
                facts: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
                return facts
        pytest.fail(self.log.read_text())

    def remove_worker(self) -> dict[str, Any]:
        """Kill every process of one worker node."""
        assert self.process.stdin is not None
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        return self.read_reply()

    def end(self) -> None:
        """End the cluster and all its processes."""
        mine = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        try:
            self.process.communicate(timeout=HANG_S)  # closes its standard input, which ends it
        finally:
            for process in alive(mine):
                process.kill()


@contextmanager
def running_cluster(setting: str) -> Iterator[RunningCluster]:
    """Context of a cluster in one of the settings of tests/e2e/cluster.py."""
    ray_dir = Path(tempfile.mkdtemp(prefix="pg"))
    running = RunningCluster(ray_dir, setting)
    try:
        yield running
    finally:
        running.end()
        shutil.rmtree(ray_dir, ignore_errors=True)


def engines_by_node(dashboard: str) -> Counter[str]:
    """Return how many engines run on each node."""
    deployments = serve_details(dashboard).get("applications", {}).get("pagoda", {}).get("deployments", {})
    replicas = deployments.get("engine", {}).get("replicas", ())
    return Counter(replica["node_id"] for replica in replicas if replica["state"] == "RUNNING")


def num_migrations(url: str) -> float:
    """Return how many requests the ingresses have moved to another engine."""
    lines = httpx.get(f"{url}/metrics", timeout=HANG_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("pagoda_request_migrations_total"))
