"""A real Prometheus that scrapes both endpoints of a running server: GET /metrics and Ray's agent."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.server import Server
from tests.ports import free_port
from tests.waiting import HANG_S


@dataclass
class Prometheus:
    """A running Prometheus, by its HTTP API."""

    url: str
    log: Path

    def get(self, path: str, **params: Any) -> Any:
        """Return the data of an answer; fail with Prometheus's error message."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=HANG_S)
        assert answer.status_code == 200, f"{params}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current series of an expression."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def numbers(self, expression: str, start: float, end: float) -> list[float]:
        """Return all finite values of an expression between two times."""
        result = self.get("query_range", query=expression, start=start, end=end, step=2)["result"]
        numbers = [float(value) for series in result for _, value in series["values"]]
        return [number for number in numbers if abs(number) < float("inf")]

    def history(self, name: str) -> str:
        """Return a metric's values of the last minute at both endpoints, and whether the endpoints answered."""
        wanted = ("up", "scrape_duration_seconds", f"pagoda_{name}", f"ray_pagoda_{name}")
        histories = [series for metric in wanted for series in self.query(f"{metric}[1m]")]
        return "\n".join(f"{series['metric']}: {[value for _, value in series['values']]}" for series in histories)

    def values(self, series: str, label: str) -> list[str]:
        """Return a label's values, as Grafana's label_values() does."""
        values: list[str] = self.get(f"label/{label}/values", **{"match[]": series})
        return values


@contextmanager
def running_prometheus(directory: Path, server: Server, rule_files: list[Path]) -> Iterator[Prometheus]:
    """Run a Prometheus inside the ``with`` block."""
    # Ray writes the addresses of its agents to this file.
    discovered = server.ray_dir / "ray" / "prom_metrics_service_discovery.json"
    every = {"scrape_interval": "4s", "scrape_timeout": "4s"}  # an ingress waits 2 s for a dying replica
    jobs = [
        {"job_name": "pagoda", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}], **every},
        {"job_name": "ray", "file_sd_configs": [{"files": [str(discovered)]}], **every},
    ]
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    prometheus = Prometheus(f"http://127.0.0.1:{port}", directory / "prometheus.log")
    command = ["prometheus", f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data"]
    with prometheus.log.open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield prometheus
    finally:
        process.terminate()
        process.wait(timeout=HANG_S)
