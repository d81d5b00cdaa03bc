"""A replica reads a prompt's KV from the one that has computed it, as the router chooses, and answers the same."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, by_replica, running_server
from tests.waiting import HANG_S, until_async

AT_ONCE = 2  # requests that an engine takes
ROUNDS = 600  # a source of an unknown rate is tried for one request of 64


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines that take few requests at a time, so that the third of a prefix must go to the other one."""

    def change(args: dict[str, Any]) -> None:
        args["engine"]["dtype"] = "float32"
        args["replicas"]["num_engine_replicas"] = 2
        args["limits"]["max_concurrent_requests_per_engine"] = AT_ONCE

    with running_server(tmp_path_factory.mktemp("crowded"), change) as server:
        yield server


def _moved(server: Server, direction: str) -> float:
    """Return the tokens whose KV has moved between replicas."""
    samples = server.metrics_of_all()
    return sum(by_replica(samples, "pagoda_kv_tier_tokens_total", tier="peer", direction=direction).values())


@pytest.mark.exhaustive("hundreds of requests, until the router tries a peer of an unknown rate")
async def test_a_prefix_moves_to_the_other_replica(crowded: Server) -> None:
    stem = " ".join(f"Rule {number}: be kind to guest {number}." for number in range(120))
    async with httpx.AsyncClient(base_url=crowded.url, timeout=HANG_S) as client:

        async def ask(case: str, number: int) -> str:
            body = {"prompt": f"Case {case}. {stem} Question {number}?", "max_tokens": 16, "temperature": 0}
            answer = await client.post("/v1/completions", json=body | {"ignore_eos": True})
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        for number in range(ROUNDS):
            case = uuid.uuid4().hex
            expected = await ask(case, 0)
            answers = await asyncio.gather(*(ask(case, 0) for _ in range(AT_ONCE + 1)))
            assert set(answers) == {expected}
            if number % 16 == 15 and await asyncio.to_thread(_moved, crowded, "in"):
                break
        else:
            pytest.fail("no prefix has moved")
        await until_async(lambda: _moved(crowded, "out") >= _moved(crowded, "in"), "both sides count it")
