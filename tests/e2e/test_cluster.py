"""A cluster node is lost under load: the streams of its engines continue on the other node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import SETTINGS
from tests.e2e.load import Clients, questions, record
from tests.e2e.running_cluster import RunningCluster, engines_by_node, num_migrations, running_cluster
from tests.waiting import HANG_S, until

SETTING = SETTINGS["engines"]

pytestmark = [pytest.mark.exhaustive("a Ray cluster of three nodes with five replicas"), pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("engines") as running:
        yield running


def _wait_for_engines(dashboard: str, nodes: list[str]) -> None:
    wanted = Counter(dict.fromkeys(nodes, SETTING.engines_per_node))
    until(lambda: engines_by_node(dashboard) == wanted, f"the engines fill {nodes}", hang_s=2 * HANG_S)


async def test_streams_survive_the_loss_of_a_worker_node(cluster: RunningCluster) -> None:
    facts = await asyncio.to_thread(cluster.read_reply)
    assert len(facts["workers"]) == SETTING.workers
    await asyncio.to_thread(_wait_for_engines, facts["dashboard"], facts["workers"])
    asked = await record(cluster, questions(32))
    async with Clients(cluster, asked).running() as report:
        await report.until_completed(32)
        left = await asyncio.to_thread(cluster.remove_worker)
        await asyncio.to_thread(_wait_for_engines, facts["dashboard"], left["workers"])
        await report.until_completed(32)
    report.check()
    assert await asyncio.to_thread(num_migrations, cluster.url) > 0
