"""Replicas shut down and are killed under streams with long prompts: little of their KV is computed again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.load import Answer, Clients, Question, Recorded, ask, difference, new_client, record
from tests.e2e.losses import num_lost, until_complete
from tests.e2e.server import Server, by_replica, running_server, write_config
from tests.waiting import HANG_S, until_async

ENGINES, CLIENTS = 3, 6
GRACE_S = 3.0
CHUNKS_BEFORE_LOSS = 200  # of 1,200 tokens
MAX_RECOMPUTED = 0.2  # of the tokens of streams that moved
HANDOVERS = "pagoda_request_handovers_total"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def _change(args: dict[str, Any]) -> None:
    args["engine"]["dtype"] = "float32"
    args["replicas"].update(num_engine_replicas=ENGINES, cpus_per_engine=0.1, cpus_per_ingress=0.1)
    args["router"].update(kv_replication=64)
    args["limits"].update(graceful_shutdown_s=GRACE_S, max_migrations=100)


@pytest.fixture(scope="module")
def restoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("restoring"), _change) as running:
        yield running


def _questions(count: int) -> list[Question]:
    """Return requests whose prompts of about 1,000 tokens share nothing."""
    return [_question(" ".join(f"Rule {row} of case {case}: be kind." for row in range(60))) for case in range(count)]


def _question(prompt: str) -> Question:
    common = {"max_tokens": 1200, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return Question("/v1/completions", common | {"prompt": prompt, "temperature": 0})


@pytest.fixture(scope="module")
def asked(restoring: Server) -> Recorded:
    """Requests with the answers of an undisturbed server."""
    asyncio.run(until_complete(restoring, engines=ENGINES, ingresses=1))
    return asyncio.run(record(restoring, _questions(6)))


def _deploy(server: Server, directory: Path, engines: int) -> None:
    """Scale the engines with `serve deploy`."""
    path = write_config(directory / "scaled.yaml", server.port, _change)
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["deployments"] = [{"name": "engine", "num_replicas": engines}]
    path.write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", "--address", server.dashboard, str(path)]
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=HANG_S)


def _answers(asked: Recorded) -> list[Answer]:
    return [answer for _, answer in asked]


def _moved(server: Server) -> dict[str, float]:
    """Return how many tokens of streams that moved were restored and computed again, at the replicas that run now."""
    samples = server.metrics_of_all()
    kinds = ("restored", "recomputed")
    return {kv: sum(by_replica(samples, "pagoda_resumed_tokens_total", kv=kv).values()) for kv in kinds}


async def test_a_killed_replica_costs_little_of_the_kv_of_its_streams(restoring: Server, asked: Recorded) -> None:
    await until_complete(restoring, engines=ENGINES, ingresses=1)
    pids = restoring.live_pids("engine")
    killed: list[str] = []

    async def kill(response: httpx.Response, number: int) -> None:
        if number == CHUNKS_BEFORE_LOSS:
            killed.append(response.headers["x-pagoda-replica"])
            os.kill(pids[killed[0]], signal.SIGKILL)

    async with new_client(restoring) as client:
        asking = [ask(client, question, None if number else kill) for number, (question, _) in enumerate(asked)]
        answers = await asyncio.gather(*asking)
    assert [difference(*pair) for pair in zip(answers, _answers(asked), strict=True) if pair[0] != pair[1]] == []
    assert len(killed) == 1
    assert num_lost(restoring) > 0
    moved = _moved(restoring)
    print("MOVED", moved, num_lost(restoring))
    assert moved["restored"] > 0
    assert moved["recomputed"] <= MAX_RECOMPUTED * sum(moved.values())  # without tiers all would be


async def test_a_replica_with_a_short_grace_hands_its_streams_over(
    restoring: Server, asked: Recorded, tmp_path: Path
) -> None:
    await until_complete(restoring, engines=ENGINES, ingresses=1)
    lost = num_lost(restoring)
    async with Clients(restoring, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        await asyncio.to_thread(_deploy, restoring, tmp_path, 1)
        await until_async(lambda: len(restoring.pids("engine")) == 1, "one engine is left")
    report.check()
    moved = _moved(restoring)
    print("MOVED", moved, restoring.total(HANDOVERS))
    assert num_lost(restoring) == lost
    assert restoring.total(HANDOVERS) > 0
    assert moved["recomputed"] <= MAX_RECOMPUTED * sum(moved.values())
