"""Replicas shut down and are killed under streams with long prompts: little of their KV is computed again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.launcher.dashboard import _serve_api
from deployments.launcher.direct import direct_urlopen
from tests.e2e.load import Question, Recorded, ask, difference, new_client, record
from tests.e2e.losses import num_lost, until_complete
from tests.e2e.server import Server, by_replica, running_server, write_config
from tests.waiting import HANG_S

ENGINES = 3
GRACE_S = 2.0
CHUNKS_BEFORE_LOSS = 10  # of 1,200 tokens
MAX_TRIES = 4  # the last ones are only needed if engines finish streams before a client reads their beginning
MAX_RECOMPUTED = 0.2  # of the tokens of streams that moved
HANDOVERS = "pagoda_request_handovers_total"

pytestmark = [
    pytest.mark.exhaustive(
        "a server of its own, whose replicas start again; tests/deployments/requests has a quick one"
    ),
    pytest.mark.timeout(600),
]


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


def _scale(server: Server, directory: Path, engines: int) -> None:
    """Deploy the config with another number of engines, as `serve deploy` does, but without its start."""
    path = write_config(directory / "scaled.yaml", server.port, _change)
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["deployments"] = [{"name": "engine", "num_replicas": engines}]
    request = _serve_api(server.dashboard)
    request.method, request.data = "PUT", json.dumps(document).encode()
    request.add_header("Content-Type", "application/json")
    with direct_urlopen(request, timeout=HANG_S):
        pass


def _moved(server: Server) -> dict[str, float]:
    """Return how many tokens of streams that moved were restored and computed again, at the replicas that run now."""
    samples = server.metrics_of_all()
    kinds = ("restored", "recomputed")
    return {kv: sum(by_replica(samples, "pagoda_resumed_tokens_total", kv=kv).values()) for kv in kinds}


async def _ask_all(server: Server, asked: Recorded, disturb: Callable[[str], Awaitable[None]]) -> None:
    """Ask everything at once, and call ``disturb`` with a replica that is in the middle of an answer."""

    async def on_chunk(response: httpx.Response, number: int) -> None:
        if number == CHUNKS_BEFORE_LOSS:
            await disturb(response.headers["x-pagoda-replica"])

    async with new_client(server) as client:
        asking = [ask(client, question, None if number else on_chunk) for number, (question, _) in enumerate(asked)]
        answers = await asyncio.gather(*asking)
    pairs = zip(answers, (expected for _, expected in asked), strict=True)
    assert [difference(*pair) for pair in pairs if pair[0] != pair[1]] == []


async def test_a_killed_replica_costs_little_of_the_kv_of_its_streams(restoring: Server, asked: Recorded) -> None:
    async def kill(replica: str) -> None:
        os.kill(restoring.live_pids("engine")[replica], signal.SIGKILL)

    for _ in range(MAX_TRIES):
        await until_complete(restoring, engines=ENGINES, ingresses=1)
        await _ask_all(restoring, asked, kill)
        if num_lost(restoring):
            break
    moved = _moved(restoring)
    assert moved["restored"] > 0
    assert moved["recomputed"] <= MAX_RECOMPUTED * sum(moved.values())  # without tiers all would be


async def test_a_replica_with_a_short_grace_hands_its_streams_over(
    restoring: Server, asked: Recorded, tmp_path: Path
) -> None:
    lost = num_lost(restoring)

    async def scale_down(replica: str) -> None:
        await asyncio.to_thread(_scale, restoring, tmp_path, 1)

    for _ in range(MAX_TRIES):
        await asyncio.to_thread(_scale, restoring, tmp_path, ENGINES)
        await until_complete(restoring, engines=ENGINES, ingresses=1)
        await _ask_all(restoring, asked, scale_down)
        if restoring.total(HANDOVERS):
            break
    moved = _moved(restoring)
    assert num_lost(restoring) == lost
    assert moved["restored"] > 0
    assert moved["recomputed"] <= MAX_RECOMPUTED * sum(moved.values())
