"""Hundreds of clients vanish in mid-stream: no block, request or connection of theirs is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Container
from contextlib import suppress
from typing import Any

import psutil

from tests.e2e.server import Server
from tests.waiting import HANG_S, until_async

CLIENTS, AT_ONCE = 200, 50
ADDRESS = "127.0.8.1"  # of the clients here, by which their connections are told from those of other tests
MAX_TURNS = 2000  # of the event loop before a client leaves that reads nothing


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
    is_polite, turns = rng.random() < 0.5, rng.randrange(MAX_TURNS)
    try:
        writer.write(_request(number))
        for _ in range(0 if wanted else turns):
            await asyncio.sleep(0)
        while received < wanted and (data := await asyncio.wait_for(reader.read(2**16), HANG_S)):
            text += data
            received = text.count(b"data: ")
    finally:
        if is_polite:
            writer.close()
        else:
            writer.transport.abort()
    return text.split(b" ", 2)[1].decode() if text else "none"


async def vanish(server: Server, count: int) -> Counter[str]:
    """Let ``count`` clients vanish, some at once; return how many got which status."""
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
        return self._server.usage() | {"clients": float(self._num_clients())}

    def descriptors(self) -> list[int]:
        """Return the number of open files and sockets of each replica."""
        return [replica.num_fds() for replica in self._replicas]

    async def until_descriptors(self, before: list[int]) -> None:
        """Wait until each replica has about as many descriptors as before: the proxy closes idle connections."""

        def are_closed() -> bool:
            return all(now <= then + 10 for now, then in zip(self.descriptors(), before, strict=True))

        await until_async(are_closed, f"about {before} descriptors", details=self.descriptors)

    def _num_clients(self) -> int:
        count = 0
        for process in self._server.processes():
            with suppress(psutil.NoSuchProcess):  # the proxy is replaced now and then
                connections = process.net_connections("tcp")
                established = [conn for conn in connections if conn.status == psutil.CONN_ESTABLISHED]
                count += sum((conn.laddr.port, conn.raddr.ip) == (self._server.port, ADDRESS) for conn in established)
        return count

    async def until_nothing_is_used(self, *, but: Container[str] = ()) -> None:
        """Wait until nothing is used, but for some kinds."""

        def is_unused() -> bool:
            return not any(value for name, value in self.read().items() if name not in but)

        await until_async(is_unused, "nothing is used", details=self.read)


async def test_hundreds_of_clients_that_vanish_leave_nothing(server: Server) -> None:
    usage = Usage(server)
    await vanish(server, AT_ONCE)  # the proxy keeps some connections to the ingress
    await usage.until_nothing_is_used()
    before = usage.descriptors()
    aborted = server.num_finished(reason="abort")
    statuses = await vanish(server, CLIENTS)
    await usage.until_nothing_is_used()
    assert statuses.keys() <= {"200", "none"}
    await usage.until_descriptors(before)
    assert server.num_finished(reason="abort") > aborted + CLIENTS / 4
