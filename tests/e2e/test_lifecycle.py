"""A running server is changed with `serve deploy`: streams that run meanwhile end as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import Server, end_server, start_server, write_config
from tests.e2e.load import Answer, Clients, Question, questions, record

ENGINES = 4

pytestmark = pytest.mark.timeout(400)


def _change(args: dict[str, Any]) -> None:
    """Four engines whose CPU shares leave room, on two cores, for their successors while they end their streams."""
    args["engine"]["dtype"] = "float32"
    args["replicas"].update(engines=ENGINES, cpus_per_engine=0.1, cpus_per_ingress=0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ray_dir = Path(tempfile.mkdtemp(prefix="pg"))
    running = start_server(tmp_path_factory.mktemp("lifecycle"), ray_dir, _change)
    try:
        running.wait_until_ready(timeout_s=180)
        asyncio.run(_until(lambda: len(running.pids("engine")) == ENGINES, 120))
        yield running
    finally:
        end_server(running)
        shutil.rmtree(ray_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def asked(server: Server) -> list[tuple[Question, Answer]]:
    """Requests and what an undisturbed server answers them."""
    some = questions(32)
    return list(zip(some, asyncio.run(record(server.url, some)), strict=True))


def _deploy(server: Server, directory: Path, engines: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Run `serve deploy` with the server's config and so many engines.

    The number goes where it restarts nothing: a change of the application's arguments replaces every replica.
    """

    def both(args: dict[str, Any]) -> None:
        _change(args)
        change(args)

    path = write_config(directory / "changed.yaml", server.port, both)
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["deployments"] = [{"name": "engine", "num_replicas": engines}]
    path.write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", "--address", server.dashboard, str(path)]
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


async def test_a_scale_down_to_one_engine(server: Server, asked: list[tuple[Question, Answer]], tmp_path: Path) -> None:
    engines, ingresses = server.pids("engine"), server.pids("ingress")
    async with Clients(server.url, asked).running() as report:
        await asyncio.sleep(2)
        await asyncio.to_thread(_deploy, server, tmp_path, 1, lambda args: None)
        await _until(lambda: len(server.pids("engine")) == 1, 120)
    assert report.failures == []
    assert server.pids("engine").items() <= engines.items()
    assert server.pids("ingress") == ingresses
    assert sum(server.metric("pagoda_request_migrations_total").values()) == 0, "a stream was cut"


async def test_a_rolling_update(server: Server, asked: list[tuple[Question, Answer]], tmp_path: Path) -> None:
    """The engine and the only ingress are replaced by those of another version."""
    before = server.pids("engine") | server.pids("ingress")
    async with Clients(server.url, asked).running() as report:
        await asyncio.sleep(2)
        await asyncio.to_thread(_deploy, server, tmp_path, 2, lambda args: args["engine"].update(max_num_seqs=48))
        await _until(lambda: len(server.pids("engine").keys() - before.keys()) == 2, 240)
        await _until(lambda: len(server.pids("ingress").keys() - before.keys()) == 1, 60)
    assert report.failures == []
    assert sum(server.metric("pagoda_request_migrations_total").values()) == 0, "a stream was cut"
