"""A server for benchmarks: the shipped config with changes, started by the launcher, on a free port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from deployments.launcher.dashboard import serve_details
from deployments.launcher.direct import direct_urlopen

__all__ = ["ROOT", "Server", "serve"]

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0


class Server:
    """A running server.

    Args:
        url: where it listens.
        process: the launcher.
        log: what the launcher prints.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log

    def engines(self) -> dict[str, int]:
        """Return the process of each engine replica that runs, by its name."""
        (dashboard, *_) = re.findall(r"dashboard at .*?(https?://[\d.]+:\d+)", self.log.read_text(encoding="utf-8"))
        deployments = serve_details(dashboard)["applications"]["pagoda"]["deployments"]
        replicas = deployments["engine"]["replicas"]
        return {item["replica_id"]: item["pid"] for item in replicas if item["state"] == "RUNNING"}

    def metric(self, name: str) -> float:
        """Return a metric's sum over replicas and labels."""
        with direct_urlopen(f"{self.url}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def metric_by_replica(self, name: str) -> dict[str, float]:
        """Return a metric's value for each engine replica."""
        with direct_urlopen(f"{self.url}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {sample.labels["replica"]: sample.value for sample in samples}


@contextmanager
def serve(
    change: Callable[[dict[str, Any]], None],
    deployments: list[dict[str, Any]] | None = None,
    engines: int = 1,
    *,
    import_path: str | None = None,
    launcher: str = "deployments.launch",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server while the block runs.

    Args:
        change: edits the arguments of the application.
        deployments: Serve's own overrides for the application's deployments.
        engines: replicas to wait for.
        import_path: of another application builder than the shipped one, which then has a launcher of its own.
        launcher: the module that runs the server.
        environment: variables of the server's processes.
    """
    with tempfile.TemporaryDirectory(prefix="pg") as directory, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        document = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        document["http_options"]["port"] = port
        application = document["applications"][0]
        change(application["args"])
        if import_path:
            application["import_path"] = import_path
        if deployments:
            application["deployments"] = deployments
        config = Path(directory) / "config.yaml"
        config.write_text(yaml.safe_dump(document))
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", launcher, str(config)],
                cwd=ROOT,
                env={**os.environ, "RAY_TMPDIR": directory, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", process, Path(directory) / "log")
        try:
            _wait(server, engines)
            yield server
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=90)


def _wait(server: Server, engines: int) -> None:
    deadline, log = time.monotonic() + START_TIMEOUT_S, server.log
    while "pagoda: ready" not in log.read_text(encoding="utf-8") or len(_engines(server)) < engines:
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text(encoding='utf-8')[-4000:]}")
        time.sleep(0.25)


def _engines(server: Server) -> dict[str, float]:
    try:
        return server.metric_by_replica("pagoda_num_requests_running")
    except (OSError, urllib.error.URLError):
        return {}
