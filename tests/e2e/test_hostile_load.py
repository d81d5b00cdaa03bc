"""Thousands of clients that mean harm, twice: each gets an answer, and nothing grows from one time to the next."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from itertools import islice

import httpx
import numpy as np
import psutil
import pytest

from benchmarks.serving.pauses import watching_pauses
from benchmarks.serving.streams import Reply, idle_connections, probing, send
from tests.e2e.abuse import burst, memory, names, trickles
from tests.e2e.conftest import Server
from tests.e2e.hostile import each_once, headers_everywhere, mixtures, strange_bodies
from tests.e2e.test_hostile_clients import QUESTION, send_all
from tests.e2e.test_vanishing_clients import Usage, vanish

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

MIXTURES, BODIES, MIN_STRANGE = 1000, 700, 5000  # of a round, and of both
TRICKLES = 40  # of heads, and as many of bodies and of silent clients
MAX_TRICKLE_S = 13.0  # the limits of heads and bodies are 10
VANISHING = 150
BURST = 2000
IDLE_OF_EACH_ADDRESS, IDLE_ADDRESSES = 4200, ("127.0.5.1", "127.0.5.2")
PROBES = ("/health", "/-/healthz")
MAX_PROBE_P99_S = 1.0
STREAMS_BESIDE, ORDINARY_P50_S, ORDINARY_MAX_S = 400, 1.0, 2.0  # where other work has the cores
GROWTH, NOISE_MIB = 1.10, 4.0  # a process of 10 MiB may take some pages more


async def _strange(server: Server, seed: int) -> Counter[int]:
    rng = random.Random(seed)
    requests = [*each_once(), *headers_everywhere(), *islice(mixtures(rng), MIXTURES)]
    requests += islice(strange_bodies(rng), BODIES)
    rng.shuffle(requests)
    return await send_all(server, requests)


def _closed(connections: list[socket.socket]) -> int:
    """Return how many connections the server has closed, or has not accepted."""
    closed = 0
    for one in connections:
        one.setblocking(False)
        try:
            closed += one.recv(1) == b""
        except BlockingIOError:
            pass
        except OSError:
            closed += 1
    return closed


async def _hold_idle_connections(server: Server) -> None:
    """Take more connections than HAProxy accepts from these addresses; this machine's own is served meanwhile."""
    first, second = IDLE_ADDRESSES
    with (
        idle_connections(server.port, IDLE_OF_EACH_ADDRESS, address=first) as one,
        idle_connections(server.port, IDLE_OF_EACH_ADDRESS, address=second) as other,
    ):
        await asyncio.sleep(0.5)
        assert _closed([*one, *other]) > 0
        own = await asyncio.to_thread(send, server.port, "/v1/completions", address="127.0.0.1", body=QUESTION)
        assert own.status == 200, own
    # HAProxy has seen the end of all of them when the address may connect again.
    while (await asyncio.to_thread(send, server.port, "/-/healthz", address=first)).status != 200:
        await asyncio.sleep(0.1)


async def _burst(server: Server) -> dict[str, list[float]]:
    """Return the seconds of the probes meanwhile, but for the machine's pauses."""
    with watching_pauses() as pauses, probing(server.port, PROBES, address="127.0.6.1") as replies:
        outcomes = await burst(server.port, BURST, address="127.0.6.2")
    assert {one.status for one in outcomes} <= {200, 503}
    assert all(one.is_complete for one in outcomes if one.status == 200)
    assert max(one.total_s for one in outcomes) < 60
    for path, of_path in replies.items():
        assert {one.status for one in of_path} == {200}, (path, of_path)
    return {path: [one.seconds_without(pauses) for one in of_path] for path, of_path in replies.items()}


async def _round(server: Server, seed: int) -> int:
    """One time everything; returns the number of strange requests."""
    statuses, _ = await asyncio.gather(_strange(server, seed), vanish(server, VANISHING))
    slowest = await trickles(server.port, TRICKLES)
    assert slowest < MAX_TRICKLE_S
    await _hold_idle_connections(server)
    for path, seconds in (await _burst(server)).items():
        assert np.percentile(seconds, 99) <= MAX_PROBE_P99_S, (path, sorted(seconds)[-5:])
    print(statuses, f"trickles: {slowest:.1f} s")
    assert not any((await Usage(server).until_nothing_is_used(but=("clients",))).values())
    return statuses.total()


async def test_other_addresses_are_served_beside_idle_connections_and_streams(server: Server) -> None:
    """The requests come one after the other until the last stream has ended.

    Engines let addresses take turns: one that comes just after all streams waits for the next free slot only.
    """
    body = QUESTION | {"max_tokens": 8}
    replies: list[Reply] = []
    with (
        idle_connections(server.port, IDLE_OF_EACH_ADDRESS, address=IDLE_ADDRESSES[0]),
        watching_pauses() as pauses,
    ):
        streams = asyncio.create_task(burst(server.port, STREAMS_BESIDE, address="127.0.6.2"))
        while not streams.done():
            reply = await asyncio.to_thread(send, server.port, "/v1/completions", address="127.0.6.3", body=body)
            assert reply.status == 200
            replies.append(reply)
        outcomes = await streams
    seconds = [one.seconds_without(pauses) for one in replies]
    assert {one.status for one in outcomes} == {200}
    print(f"{len(seconds)} ordinary requests: {np.median(seconds):.2f} s at the median, at most {max(seconds):.2f} s")
    assert len(seconds) >= 3
    assert np.median(seconds) <= ORDINARY_P50_S
    assert max(seconds) <= ORDINARY_MAX_S


def _answer(client: httpx.Client) -> str:
    return str(client.post("/v1/completions", json=QUESTION).raise_for_status().json()["choices"][0]["text"])


async def test_a_server_is_the_same_after_two_rounds_of_abuse(server: Server, client: httpx.Client) -> None:
    before = _answer(client)
    await _burst(server)  # for as many requests at once Python takes memory that it keeps for the next ones
    processes: list[psutil.Process] = server.processes()
    name_of = names(processes)
    strange = await _round(server, 1)
    first = memory(processes)
    strange += await _round(server, 2)
    assert strange >= MIN_STRANGE
    second = memory(processes)
    sizes = {f"{name_of[pid]} {pid}": (first[pid], mib) for pid, mib in second.items() if pid in first}
    print("\n".join(f"{name}: {then:.1f} MiB, then {now:.1f}" for name, (then, now) in sizes.items()))
    assert {name.split(" ")[0] for name in sizes} >= {"ingress", "engine", "haproxy"}
    assert {name: both for name, both in sizes.items() if both[1] > GROWTH * both[0] + NOISE_MIB} == {}
    assert send(server.port, "/health", address="127.0.0.1").status == 200
    assert _answer(client) == before
