"""What tests do to the processes of a server under load: kill them, stop them, and cut their connections.

Nothing here waits for a time: the next disturbance comes when the clients have completed more requests.
"""

from __future__ import annotations

import asyncio
import csv
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil

from tests.e2e.connections import channel_connections, cut
from tests.e2e.load import Report
from tests.e2e.server import Server, by_replica
from tests.waiting import HANG_S, until, until_async

MIGRATIONS = "pagoda_request_migrations_total"
RECONNECTIONS = "pagoda_channel_reconnections_total"
STALLED = "sent nothing for"  # in the message of a ReplicaStalledError


async def until_complete(server: Server, *, engines: int, ingresses: int) -> None:
    """Wait until Serve has replaced all processes that have ended, and the ingress knows the engines."""

    def is_complete() -> bool:
        replicas = server.live_pids("engine"), server.live_pids("ingress")
        return (len(replicas[0]), len(replicas[1])) == (engines, ingresses)

    await until_async(is_complete, f"{engines} engines and {ingresses} ingresses run", details=server.log.read_text)
    metric = "pagoda_num_requests_running"
    await until_async(lambda: len(server.metric(metric)) == engines, f"an ingress knows {engines} engines")


def num_lost(server: Server) -> int:
    """Return how many requests have lost their replica, from the logs of all ingresses, also of ended ones.

    Stalls do not count: on a slow machine a replica that works may send nothing for as long as one that does not.
    """
    logs = list(server.ray_dir.glob("ray/session_latest/logs/serve/replica_pagoda_ingress_*.log"))
    assert logs
    lost = [line for log in logs for line in re.findall(r"replica \S+ was lost \(.*", log.read_text())]
    return sum(STALLED not in line for line in lost)


@contextmanager
def stopped_engines(server: Server) -> Iterator[Callable[[], None]]:
    """Stop all engines while the block runs, so that they cannot be faster than the test on any machine.

    Yields a function that lets them go on for a moment, measured by their own processor time: called until a stream
    has begun, it leaves most of the stream's tokens uncomputed, however slow the test is.
    """
    engines = [psutil.Process(pid) for pid in server.engine_pids().values()]
    assert engines

    def signal_all(number: int) -> None:
        for engine in engines:
            os.kill(engine.pid, number)

    def go_on() -> None:
        before = [_cpu_seconds(engine) for engine in engines]
        signal_all(signal.SIGCONT)
        until(
            lambda: any(_cpu_seconds(engine) > seconds for engine, seconds in zip(engines, before, strict=True)),
            "an engine computes",
            pause_s=0.001,
        )
        signal_all(signal.SIGSTOP)

    signal_all(signal.SIGSTOP)
    try:
        yield go_on
    finally:
        signal_all(signal.SIGCONT)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)  # in steps of a hundredth


def num_unfinished(server: Server) -> int:
    """Return how many unfinished requests the ingresses have, which no engine needs to say."""
    answer = httpx.get(f"{server.url}/load", headers=server.headers, timeout=HANG_S)
    return int(answer.raise_for_status().json()["server_load"])


async def until_unfinished(server: Server, number: int) -> None:
    """Wait until the ingresses have that many unfinished requests."""
    await until_async(
        lambda: num_unfinished(server) == number,
        f"{number} unfinished requests",
        details=lambda: num_unfinished(server),
    )


class Signals:
    """Sends a signal to one engine replica after another.

    Args:
        server: has the replicas.
        number: the signal: SIGKILL, or SIGSTOP, after which a process keeps its connections open.
        report: of the clients that send requests meanwhile.
        pace: how many requests the clients complete between two signals.
    """

    def __init__(self, server: Server, number: signal.Signals, report: Report, *, pace: int) -> None:
        self.signalled: dict[str, int] = {}  # process ids by replica
        self._server = server
        self._number = number
        self._report = report
        self._pace = pace
        self._random = random.Random(number)
        self._num_engines = len(server.live_pids("engine"))

    async def send(self, times: int) -> None:
        """Send the signal ``times`` times, and wait until a request has migrated."""
        before = await asyncio.to_thread(self._server.total, MIGRATIONS)
        while len(self.signalled) < times:
            await self._send_one()
        if self._number == signal.SIGSTOP:  # the router sends it requests until one has stalled
            await until_async(lambda: self._server.total(MIGRATIONS) > before, "a request migrates")
        while await asyncio.to_thread(self._server.total, MIGRATIONS) == before:  # the dead replicas had no requests
            assert len(self.signalled) < 3 * times, "no signal has interrupted a request"
            await self._send_one()

    async def _send_one(self) -> None:
        engines = await until_async(self._half, "half of the engines run")
        replica = self._random.choice(sorted(engines))
        self.signalled[replica] = engines[replica]
        os.kill(engines[replica], self._number)
        await self._report.until_completed(self._pace)

    def _half(self) -> dict[str, int] | None:
        """Return the replicas without a signal, if they are half of all engines or more."""
        live = self._server.live_pids("engine")
        engines = {replica: pid for replica, pid in live.items() if replica not in self.signalled}
        return engines if 2 * len(engines) >= self._num_engines else None

    def kill_stopped_processes(self) -> None:
        """Kill the signalled processes that still exist."""
        for pid in self.signalled.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def cut_connections(server: Server, report: Report, times: int) -> tuple[int, int]:
    """Cut all of an engine's connections to the ingresses, again and again; each time wait until they are new.

    Returns:
        How many connections of the request channel were made again, and how many requests have lost their replica.
    """

    def num_reconnections() -> float:
        return sum(by_replica(server.metrics_of_all(), RECONNECTIONS).values())

    rng = random.Random(4)
    moved, first = num_lost(server), num_reconnections()
    engines, ingresses = server.pids("engine"), server.pids("ingress").values()
    for _ in range(times):
        before = await asyncio.to_thread(num_reconnections)
        pid = rng.choice(sorted(engines.values()))
        for fd in await asyncio.to_thread(channel_connections, pid, ingresses):
            with suppress(OSError):  # it has just been closed
                cut(pid, fd)
        await until_async(lambda before=before: num_reconnections() > before, "a connection is made again")
        await report.until_completed(1)
    return int(num_reconnections() - first), num_lost(server) - moved


async def kill_an_ingress(server: Server, report: Report) -> int:
    """Kill one ingress that has streams; return how many connections it had."""
    ingresses = await until_async(lambda: _ingresses_with_streams(server), "every ingress has streams")
    pid = random.Random(3).choice(sorted(ingresses.values()))
    num_connections = _num_accepted(pid)
    os.kill(pid, signal.SIGKILL)
    await until_async(lambda: report.broken or report.failures, "a client notices")
    return num_connections


def _num_accepted(pid: int) -> int:
    """Return the number of open connections that a process has accepted."""
    connections = psutil.Process(pid).net_connections("tcp")
    listening = {conn.laddr.port for conn in connections if conn.status == psutil.CONN_LISTEN}
    return sum(conn.status == psutil.CONN_ESTABLISHED and conn.laddr.port in listening for conn in connections)


def _ingresses_with_streams(server: Server) -> dict[str, int] | None:
    """Return the live ingresses with their process ids, if HAProxy has sent streams to each of them.

    One that was replaced a moment ago, or that HAProxy took for dead a moment ago, gets its first stream only when
    another client asks. Its open connections do not show that: HAProxy keeps those of earlier requests.
    """
    ingresses, streams = server.live_pids("ingress"), _streams_by_ingress(server)
    have_streams = all(any(count for name, count in streams.items() if name.endswith(ingress)) for ingress in ingresses)
    return ingresses if have_streams and ingresses else None


def _streams_by_ingress(server: Server) -> dict[str, int]:
    """Return the number of streams of each server that HAProxy knows, from its statistics."""
    port = server.variable("RAY_SERVE_HAPROXY_STATS_PORT")
    text = httpx.get(f"http://127.0.0.1:{port}/stats;csv", timeout=HANG_S).raise_for_status().text
    rows = csv.DictReader(text.removeprefix("# ").splitlines())
    return {row["svname"]: int(row["scur"]) for row in rows if row["check_status"]}
