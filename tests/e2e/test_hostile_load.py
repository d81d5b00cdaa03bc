"""Thousands of clients that mean harm, twice: each gets an answer, and nothing grows from one time to the next."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from itertools import islice

import httpx
import psutil
import pytest

from benchmarks.serving.streams import idle_connections, probing, send
from tests.e2e.abuse import SLOW_BYTES, burst, memory, names, trickles
from tests.e2e.hostile import each_once, headers_everywhere, mixtures, strange_bodies
from tests.e2e.server import Server
from tests.e2e.test_hostile_clients import QUESTION, send_all
from tests.e2e.test_vanishing_clients import Usage, vanish
from tests.waiting import until_async

pytestmark = [pytest.mark.exhaustive("thousands of connections and strange requests, twice"), pytest.mark.timeout(1800)]

MIXTURES, BODIES, MIN_STRANGE = 1000, 700, 5000  # of a round, and of both
TRICKLES = 40  # of heads, and as many of bodies and of silent clients
VANISHING = 150
BURST = 2000
IDLE_OF_EACH_ADDRESS, IDLE_ADDRESSES = 4200, ("127.0.5.1", "127.0.5.2")
PROBES = ("/health", "/-/healthz")
STREAMS_BESIDE = 400
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
    for connection in connections:
        connection.setblocking(False)
        try:
            closed += connection.recv(1) == b""
        except BlockingIOError:
            pass
        except OSError:
            closed += 1
    return closed


async def _hold_idle_connections(server: Server) -> None:
    """Take more connections than HAProxy accepts from these addresses; this machine's own is served meanwhile."""
    first, second = IDLE_ADDRESSES
    with (
        idle_connections(server.port, IDLE_OF_EACH_ADDRESS, address=first) as of_first,
        idle_connections(server.port, IDLE_OF_EACH_ADDRESS, address=second) as of_second,
    ):
        await until_async(lambda: _closed([*of_first, *of_second]), "the server closes some connections")
        own = await asyncio.to_thread(send, server.port, "/v1/completions", address="127.0.0.1", body=QUESTION)
        assert own.status == 200, own
    # HAProxy has seen the end of all of them when the address may connect again.
    await until_async(lambda: send(server.port, "/-/healthz", address=first).status == 200, "it may connect again")


async def _burst(server: Server) -> None:
    """Send many streams at once: each is served or rejected, and probes are answered meanwhile.

    How fast the probes are answered is what benchmarks/hostile.py measures.
    """
    with probing(server.port, PROBES, address="127.0.6.1") as replies:
        outcomes = await burst(server.port, BURST, address="127.0.6.2")
    assert {outcome.status for outcome in outcomes} <= {200, 503}
    assert all(outcome.is_complete for outcome in outcomes if outcome.status == 200)
    for path, of_path in replies.items():
        assert {reply.status for reply in of_path} == {200}, (path, of_path)


async def _round(server: Server, seed: int) -> int:
    """Do everything once; return the number of strange requests."""
    statuses, _ = await asyncio.gather(_strange(server, seed), vanish(server, VANISHING))
    assert await trickles(server.port, TRICKLES) < SLOW_BYTES
    await _hold_idle_connections(server)
    await _burst(server)
    print(statuses)
    await Usage(server).until_nothing_is_used(but=("clients",))
    return statuses.total()


async def test_other_addresses_are_served_beside_idle_connections_and_streams(server: Server) -> None:
    """Ordinary requests are answered one after the other while streams of another address still wait.

    Engines let addresses take turns: a request that comes after all streams waits for the next free slot only.
    benchmarks/hostile.py measures how long it waits.
    """
    body = QUESTION | {"max_tokens": 8}
    num_answered = 0
    with idle_connections(server.port, IDLE_OF_EACH_ADDRESS, address=IDLE_ADDRESSES[0]):
        streams = asyncio.create_task(burst(server.port, STREAMS_BESIDE, address="127.0.6.2"))
        while not streams.done():
            reply = await asyncio.to_thread(send, server.port, "/v1/completions", address="127.0.6.3", body=body)
            assert reply.status == 200
            num_answered += 1
        outcomes = await streams
    assert {outcome.status for outcome in outcomes} == {200}
    assert num_answered >= 3


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
