"""A running server is changed with `serve deploy`: running streams finish undisturbed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.launcher.dashboard import delete_applications
from tests.e2e.conftest import Server, running_server, write_config
from tests.e2e.load import Answer, Clients, Question, ask, new_client, questions, record

ENGINES = 4
NUM_LONG_STREAMS, LONG_TOKENS = 16, 1000  # long enough to run while all replicas drain

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def _change(args: dict[str, Any]) -> None:
    """Four engines whose CPU shares leave room on two cores for their replacements while they drain."""
    args["engine"]["dtype"] = "float32"
    args["replicas"].update(num_engine_replicas=ENGINES, cpus_per_engine=0.1, cpus_per_ingress=0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("lifecycle"), _change, timeout_s=180) as running:
        asyncio.run(_until(lambda: len(running.pids("engine")) == ENGINES, 120))
        yield running


@pytest.fixture(scope="module")
def asked(server: Server) -> list[tuple[Question, Answer]]:
    """Requests with the answers of an undisturbed server."""
    some = questions(32)
    return list(zip(some, asyncio.run(record(server.url, some)), strict=True))


def _deploy(server: Server, directory: Path, engines: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Run `serve deploy` with the server's config and so many engines.

    The number is set in ``deployments``, because a change of the application's arguments replaces every replica.
    """

    def both(args: dict[str, Any]) -> None:
        _change(args)
        change(args)

    path = write_config(directory / "changed.yaml", server.port, both)
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["deployments"] = [{"name": "engine", "num_replicas": engines}]
    _serve_deploy(server, path, document)


def _serve_deploy(server: Server, path: Path, document: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", "--address", server.dashboard, str(path)]
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


def _num_migrations(server: Server) -> int:
    """Return how many requests migrated, from the logs of all ingresses, ended ones included."""
    logs = list(server.ray_dir.glob("ray/session_latest/logs/serve/replica_pagoda_ingress_*.log"))
    assert logs
    return sum(log.read_text().count("its request goes on elsewhere") for log in logs)


async def test_a_scale_down_to_one_engine(server: Server, asked: list[tuple[Question, Answer]], tmp_path: Path) -> None:
    engines, ingresses = server.pids("engine"), server.pids("ingress")
    async with Clients(server.url, asked).running() as report:
        await asyncio.sleep(2)
        await asyncio.to_thread(_deploy, server, tmp_path, 1, lambda args: None)
        await _until(lambda: len(server.pids("engine")) == 1, 120)
    assert report.failures == []
    assert server.pids("engine").items() <= engines.items()
    assert server.pids("ingress") == ingresses
    assert _num_migrations(server) == 0


async def test_a_rolling_update(server: Server, asked: list[tuple[Question, Answer]], tmp_path: Path) -> None:
    """The engines and the only ingress are replaced by a new version."""
    before = server.pids("engine") | server.pids("ingress")
    async with Clients(server.url, asked).running() as report:
        await asyncio.sleep(2)
        await asyncio.to_thread(_deploy, server, tmp_path, 2, lambda args: args["engine"].update(max_num_seqs=48))
        await _until(lambda: len(server.pids("engine").keys() - before.keys()) == 2, 240)
        await _until(lambda: len(server.pids("ingress").keys() - before.keys()) == 1, 60)
    assert report.failures == []
    assert _num_migrations(server) == 0


async def test_deleting_the_applications_lets_streams_finish(server: Server) -> None:
    """This is how to drain a server; `serve shutdown` ends the proxy and with it every stream at once."""
    body = {"max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body |= {"logprobs": 5}  # makes the answers slow enough to outlast the deletion
    async with new_client(server.url) as client:
        streams = [
            asyncio.create_task(ask(client, Question("/v1/completions", body | {"prompt": f"Tale {number}"})))
            for number in range(NUM_LONG_STREAMS)
        ]
        await asyncio.sleep(1)
        assert await asyncio.to_thread(delete_applications, server.dashboard)  # `serve deploy` takes seconds to start
        await _until(lambda: not server.pids("ingress"), 30)
        assert not any(stream.done() for stream in streams)
        answers = await asyncio.gather(*streams)
    assert [len(answer.token_ids[0]) for answer in answers] == [LONG_TOKENS] * NUM_LONG_STREAMS
