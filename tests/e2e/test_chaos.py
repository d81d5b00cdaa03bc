"""Processes are killed and stopped under load: no request fails, and no token is lost, repeated or changed.

PAGODA_CHAOS_ROUNDS is how often replicas are killed (2 by default, 12 for the record), PAGODA_CHAOS_CLIENTS how many
clients there are (32). The test that stops replicas takes a third of the rounds, because a stopped replica affects a
stream like a killed one, only later. tests/e2e/test_losses.py does one round of each with a smaller load.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.load import Clients, Recorded, questions, record
from tests.e2e.losses import Signals, cut_connections, kill_an_ingress, until_complete
from tests.e2e.server import Server, running_server
from tests.waiting import until_async

ROUNDS = int(os.environ.get("PAGODA_CHAOS_ROUNDS", "2"))
CLIENTS = int(os.environ.get("PAGODA_CHAOS_CLIENTS", "32"))
ENGINES, INGRESSES = 4, 2

pytestmark = [pytest.mark.exhaustive("rounds of losses under 32 clients"), pytest.mark.timeout(600 + 60 * ROUNDS)]


def _change(args: dict[str, Any]) -> None:
    """Four engines, half of which may be missing; their CPU shares leave room for replacements on two cores."""
    args["engine"]["dtype"] = "float32"
    args["replicas"].update(num_engine_replicas=ENGINES, num_ingress_replicas=INGRESSES)
    args["replicas"].update(cpus_per_engine=0.1, cpus_per_ingress=0.1)
    args["limits"].update(health_check_period_s=1.0, health_check_timeout_s=2.0, max_migrations=3)
    args["limits"].update(stall_timeout_s=6.0)  # a new engine sends nothing while it compiles its first grammar


@pytest.fixture(scope="module")
def chaos_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("chaos"), _change) as running:
        yield running


@pytest.fixture(scope="module")
def asked(chaos_server: Server) -> Recorded:
    """Requests with the answers of an undisturbed server."""
    asyncio.run(until_complete(chaos_server, engines=ENGINES, ingresses=INGRESSES))
    pairs = asyncio.run(record(chaos_server, questions(48)))
    kinds = {kind for _, answer in pairs for parts in answer.parts.values() for kind, _ in parts}
    assert kinds == {"text", "reasoning", "call", "arguments"}
    return pairs


@pytest.fixture
async def ready_server(chaos_server: Server) -> Server:
    """The server, after all replicas of the last test have been replaced."""
    await until_complete(chaos_server, engines=ENGINES, ingresses=INGRESSES)
    return chaos_server


async def test_replicas_are_killed(ready_server: Server, asked: Recorded) -> None:
    engines = ready_server.live_pids("engine")
    async with Clients(ready_server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        signals = Signals(ready_server, signal.SIGKILL, report, pace=CLIENTS)
        await signals.send(ROUNDS)
    report.check()
    await until_complete(ready_server, engines=ENGINES, ingresses=INGRESSES)
    healthy = engines.keys() - signals.signalled.keys()
    assert healthy <= ready_server.live_pids("engine").keys(), "Serve replaced a healthy replica"


async def test_replicas_are_stopped(ready_server: Server, asked: Recorded) -> None:
    """A stopped process keeps its connections open: only its silence reveals it."""
    async with Clients(ready_server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        signals = Signals(ready_server, signal.SIGSTOP, report, pace=2 * CLIENTS)
        try:
            await signals.send(max(1, ROUNDS // 3))
        finally:
            signals.kill_stopped_processes()
    report.check()


async def test_connections_between_live_processes_are_cut(ready_server: Server, asked: Recorded) -> None:
    """What is on the way is lost, and sent again."""
    async with Clients(ready_server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        reconnected, moved = await cut_connections(ready_server, report, 5 * ROUNDS)
    report.check()
    assert moved < reconnected, "broken connections moved requests"


async def test_a_killed_ingress_costs_only_its_own_clients_a_retry(ready_server: Server, asked: Recorded) -> None:
    async with Clients(ready_server, asked, count=CLIENTS, retries=3).running() as report:
        await report.until_completed(CLIENTS)
        num_connections = await kill_an_ingress(ready_server, report)
        await report.until_completed(2 * CLIENTS)
    report.check()
    assert 0 < len(report.broken) <= num_connections
    await until_complete(ready_server, engines=ENGINES, ingresses=INGRESSES)
    await until_async(lambda: ready_server.total("pagoda_num_requests_running") == 0, "the engines are idle")
