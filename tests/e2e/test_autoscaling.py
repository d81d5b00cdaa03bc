"""An idle deployment scales to zero engines, and the first request starts one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, running_server

pytestmark = pytest.mark.long


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[Server]:
    """A server with zero to two engines that removes idle ones after two seconds."""

    def change(args: dict[str, Any]) -> None:
        args["replicas"] |= {"num_engine_replicas": 1, "cpus_per_engine": 0.1}
        args["autoscaling"] |= {"max_replicas": 2, "min_replicas": 0, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}

    with running_server(tmp_path, change) as running:
        yield running


def _wait_for_engines(server: Server, number: int) -> None:
    deadline = time.monotonic() + 90
    while len(server.pids("engine")) != number:
        assert time.monotonic() < deadline, server.pids("engine")
        time.sleep(0.25)


def test_to_zero_and_back(scaled: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=scaled.url, timeout=120) as client:
        first = client.post("/v1/completions", json=body).raise_for_status().json()
        _wait_for_engines(scaled, 0)
        assert client.get("/health").json() == {"status": "idle"}
        again = client.post("/v1/completions", json=body).raise_for_status()
    assert again.json()["choices"] == first["choices"]
    assert again.headers["x-pagoda-replica"]
