"""A replica stops, connections break, and replicas are replaced under load: no request fails, and no token changes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import PUBLIC_HOST, make_public
from tests.e2e.load import Clients, Recorded, questions, record
from tests.e2e.losses import Signals, cut_connections, num_lost, until_complete
from tests.e2e.server import Server, write_config
from tests.waiting import HANG_S, until_async

CLIENTS = 8
ENGINES, INGRESSES = 2, 2

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def asked(public_server: Server) -> Recorded:
    """Requests with the answers of an undisturbed server."""
    return asyncio.run(record(public_server, questions(20)))


@pytest.fixture
async def ready_server(public_server: Server) -> Server:
    """The server, after all replicas of the last test have been replaced."""
    await until_complete(public_server, engines=ENGINES, ingresses=INGRESSES)
    return public_server


async def test_streams_of_a_stopped_replica_continue(ready_server: Server, asked: Recorded) -> None:
    """A stopped process keeps its connections open: only its silence reveals it."""
    async with Clients(ready_server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        signals = Signals(ready_server, signal.SIGSTOP, report, pace=CLIENTS)
        try:
            await signals.send(1)
        finally:
            signals.kill_stopped_processes()
    report.check()


async def test_connections_between_live_processes_are_cut(ready_server: Server, asked: Recorded) -> None:
    """What is on the way is lost, and sent again."""
    async with Clients(ready_server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        reconnected, moved = await cut_connections(ready_server, report, 3)
    report.check()
    assert moved < reconnected, "broken connections moved requests"


# --- `serve deploy` ---------------------------------------------------------------------------------------------------


def _deploy(server: Server, directory: Path, engines: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Run `serve deploy` with the server's config and a number of engines.

    The number is set in ``deployments``, because a change of the application's arguments replaces every replica.
    """

    def both(args: dict[str, Any]) -> None:
        make_public(args)
        change(args)

    path = write_config(directory / "changed.yaml", server.port, both, PUBLIC_HOST)
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["deployments"] = [{"name": "engine", "num_replicas": engines}]
    path.write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", "--address", server.dashboard, str(path)]
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=HANG_S)


@pytest.mark.exhaustive("in CI a rolling update takes engines away under the same load")
async def test_a_scale_down_to_one_engine(ready_server: Server, asked: Recorded, tmp_path: Path) -> None:
    engines, ingresses, moved = ready_server.pids("engine"), ready_server.pids("ingress"), num_lost(ready_server)
    async with Clients(ready_server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        await asyncio.to_thread(_deploy, ready_server, tmp_path, 1, lambda args: None)
        await until_async(lambda: len(ready_server.pids("engine")) == 1, "one engine is left")
        await report.until_completed(CLIENTS)
    report.check()
    assert ready_server.pids("engine").items() <= engines.items()
    assert ready_server.pids("ingress") == ingresses
    assert num_lost(ready_server) == moved


async def test_a_rolling_update(public_server: Server, asked: Recorded, tmp_path: Path) -> None:
    """The engines and the ingresses are replaced by a new version."""
    server = public_server
    before, moved = server.pids("engine") | server.pids("ingress"), num_lost(server)

    def is_replaced() -> bool:
        new = {name: server.pids(name).keys() - before.keys() for name in ("engine", "ingress")}
        return (len(new["engine"]), len(new["ingress"])) == (ENGINES, INGRESSES)

    async with Clients(server, asked, count=CLIENTS).running() as report:
        await report.until_completed(CLIENTS)
        await asyncio.to_thread(_deploy, server, tmp_path, ENGINES, lambda args: args["engine"].update(max_num_seqs=48))
        await until_async(is_replaced, "every replica is new", hang_s=2 * HANG_S)
        await report.until_completed(CLIENTS)
    report.check()
    assert num_lost(server) == moved
