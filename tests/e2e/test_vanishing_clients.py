"""Hundreds of clients vanish in mid-stream: no block, request or connection of theirs is left."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Container
from contextlib import suppress
from typing import Any

import psutil

from tests.e2e.conftest import Server

CLIENTS, AT_ONCE = 500, 50
ADDRESS = "127.0.8.1"  # of the clients here, by which their connections are told from those of other tests
SECONDS = 15.0  # after which nothing may be left


def _request(number: int) -> bytes:
    body: dict[str, Any] = {"prompt": f"Client {number} says", "max_tokens": 400, "ignore_eos": True}
    body |= {"stream": number % 5 > 0, "n": 1 + number % 2, "logprobs": 2 if number % 3 else None}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: pagoda\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _client(server: Server, number: int, rng: random.Random) -> str:
    """Send a request, read some events, and reset or close the connection; whole answers are not waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=(ADDRESS, 0))
    wanted, received, text = rng.choice([0, 1, 8]) if number % 5 else 0, 0, b""
    is_polite, seconds = rng.random() < 0.5, rng.random() * 0.5
    try:
        writer.write(_request(number))
        if wanted == 0:
            await asyncio.sleep(seconds)
        while received < wanted and (data := await asyncio.wait_for(reader.read(2**16), 60)):
            text += data
            received = text.count(b"data: ")
    finally:
        if is_polite:
            writer.close()
        else:
            writer.transport.abort()
    return text.split(b" ", 2)[1].decode() if text else "none"


async def vanish(server: Server, count: int) -> Counter[str]:
    rng, statuses = random.Random(1), Counter[str]()
    for first in range(0, count, AT_ONCE):
        statuses.update(await asyncio.gather(*(_client(server, first + i, rng) for i in range(AT_ONCE))))
    return statuses


class Usage:
    """What the requests of a server take, outside and inside its processes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        replicas = [*server.pids("ingress").values(), *server.pids("engine").values()]
        self._replicas = [psutil.Process(pid) for pid in replicas]

    def read(self) -> dict[str, float]:
        """Return the requests and blocks of the engines, and the proxies' connections with the vanishing clients."""
        metric = self._server.metric
        return {
            "running": sum(metric("pagoda_num_requests_running").values()),
            "waiting": sum(metric("pagoda_num_requests_waiting").values()),
            "blocks": sum(metric("pagoda_kv_blocks", state="used").values()),
            "clients": float(self._num_clients()),
        }

    def descriptors(self) -> list[int]:
        """Return the number of open files and sockets of each replica."""
        return [replica.num_fds() for replica in self._replicas]

    async def until_descriptors(self, before: list[int]) -> None:
        """Fail unless each replica has about as many descriptors as before within a limited time.

        The proxy closes its idle connections to the ingress within seconds.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            after = self.descriptors()
            if all(now <= then + 10 for now, then in zip(after, before, strict=True)):
                return
            assert time.monotonic() < deadline, (before, after)
            await asyncio.sleep(0.5)

    def _num_clients(self) -> int:
        count = 0
        for process in self._server.processes():
            with suppress(psutil.NoSuchProcess):  # the proxy is replaced now and then
                established = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
                count += sum((one.laddr.port, one.raddr.ip) == (self._server.port, ADDRESS) for one in established)
        return count

    async def until_nothing_is_used(self, *, but: Container[str] = ()) -> dict[str, float]:
        """Wait for a limited time; return what is still used, but for some kinds."""
        deadline = time.monotonic() + SECONDS
        while True:
            used = {name: value for name, value in (await asyncio.to_thread(self.read)).items() if name not in but}
            if not any(used.values()) or time.monotonic() > deadline:
                return used
            await asyncio.sleep(0.1)


async def test_five_hundred_clients_that_vanish_leave_nothing(server: Server) -> None:
    usage = Usage(server)
    await vanish(server, AT_ONCE)  # the proxy keeps some connections to the ingress
    assert not any((await usage.until_nothing_is_used()).values())
    before = usage.descriptors()
    aborted = sum(server.metric("pagoda_requests_finished_total", reason="abort").values())
    statuses = await vanish(server, CLIENTS)
    assert not any((await usage.until_nothing_is_used()).values())
    assert statuses.keys() <= {"200", "none"}
    await usage.until_descriptors(before)
    assert sum(server.metric("pagoda_requests_finished_total", reason="abort").values()) > aborted + CLIENTS / 4
