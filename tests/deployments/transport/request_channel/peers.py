"""Replicas and ingresses on real sockets in this process, and a TCP proxy between them that breaks connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from deployments.transport.request_channel.address import ReplicaAddress
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.links import Links
from deployments.transport.request_channel.server import ChannelServer
from engine.async_engine import AsyncEngine
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.shadow import make_engine
from tests.waiting import HANG_S, until_in_loop

HOST = "127.0.0.1"
REPLICA = "r1"


class Replica:
    """An engine that computes nothing, with its server, which counts no silence unless the test says so."""

    def __init__(self, *, max_requests: int = 1000, **engine: Any) -> None:
        self.hashes: list[list[int]] = []
        self.inner, self.runner = make_engine(**({"num_blocks": 256, "block_size": 4} | engine))
        self.engine = AsyncEngine(self.inner)
        self.server = ChannelServer(
            self.engine,
            HOST,
            max_requests=max_requests,
            on_hashes=lambda hashes: self.hashes.append(list(hashes)),
            tick_s=1e6,
        )

    def answer(self, prompt: list[int], length: int) -> list[int]:
        return self.runner.answer(prompt, length)

    @property
    def is_idle(self) -> bool:
        """Whether no request, block or unacknowledged output is left."""
        return (
            not self.server.num_requests
            and not len(self.engine._readers)
            and self.inner.block_manager.num_free_blocks == self.inner.info.num_blocks
            and not any(ingress.compiling for ingress in self.server._ingresses.values())
        )

    async def tick_until_one_ingress_is_left(self) -> None:
        """Count the silence of all ingresses, again and again; the one that is left says something before each time."""
        ingresses = self.server._ingresses
        while len(ingresses) > 1:
            await until_in_loop(lambda: any(ingress.num_silent_ticks == 0 for ingress in ingresses.values()))
            self.server._timer.cancel()
            self.server._tick()

    async def close(self) -> None:
        await self.engine.shutdown()
        self.server.close()


class Ingress:
    """An ingress with links to replicas."""

    def __init__(self, tick_s: float = 0.02) -> None:
        self.returned: list[tuple[Dispatch, Exception]] = []
        self.num_changes = 0
        self.links = Links(on_change=self._changed, on_returned=self._returned, tick_s=tick_s)

    def _changed(self) -> None:
        self.num_changes += 1

    def _returned(self, dispatch: Dispatch, error: Exception) -> None:
        self.returned.append((dispatch, error))

    async def join(self, **addresses: ReplicaAddress) -> None:
        """Link to replicas, by name, and wait until they take requests."""
        self.links.set_replicas({name: address.metadata for name, address in addresses.items()})
        await until_in_loop(lambda: sorted(self.links.ready) == sorted(addresses))

    def submit(
        self, prompt: list[int], length: int, *, replica: str = REPLICA, hashes: Iterable[int] = (), **params: Any
    ) -> Dispatch:
        request = EngineRequest(f"request {prompt}", prompt, SamplingParams(max_tokens=length, **params))
        dispatch = Dispatch(request, list(hashes))
        self.links[replica].submit(dispatch)
        return dispatch


def in_lockstep(replica: Replica) -> None:
    """Let the event loop turn before each step of a replica's engine, so that outputs come one by one."""
    run, loop = replica.runner.run, asyncio.get_running_loop()

    def step(*args: Any) -> Any:
        has_turned = threading.Event()
        loop.call_soon_threadsafe(has_turned.set)
        assert has_turned.wait(HANG_S)
        return run(*args)

    replica.runner.run = step  # type: ignore[method-assign]


async def outputs_of(stream: Dispatch) -> list[EngineOutput]:
    """Return all outputs of a stream, as they come."""
    outputs: list[EngineOutput] = []
    while not (outputs and outputs[-1].is_last):
        await stream.wait()
        if (output := stream.take()) is not None:  # else nothing has come for a second
            outputs.append(output)
    return outputs


async def tokens_of(stream: Dispatch) -> list[int]:
    """Return all tokens of a stream."""
    return [token_id for output in await outputs_of(stream) for token_id in output.token_ids]


class Peers:
    """Makes replicas, ingresses and proxies, and closes them at the end of the test."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.ingresses: list[Ingress] = []
        self.proxies: list[Proxy] = []

    def replica(self, **options: Any) -> Replica:
        self.replicas.append(Replica(**options))
        return self.replicas[-1]

    def ingress(self, **options: Any) -> Ingress:
        self.ingresses.append(Ingress(**options))
        return self.ingresses[-1]

    async def pair(self, **options: Any) -> tuple[Replica, Ingress]:
        """Return a replica and an ingress that is linked to it."""
        replica, ingress = self.replica(**options), self.ingress()
        await ingress.join(r1=replica.server.address)
        return replica, ingress

    async def proxied(self, address: ReplicaAddress) -> tuple[ReplicaAddress, list[Proxy]]:
        """Return an address whose connections go through proxies: of requests, and of outputs."""
        proxies = [await Proxy.open(endpoint) for endpoint in (address.requests, address.outputs)]
        self.proxies += proxies
        return ReplicaAddress(proxies[0].endpoint, proxies[1].endpoint, address.secret), proxies

    async def close(self) -> None:
        for ingress in self.ingresses:
            ingress.links.close()
        for proxy in self.proxies:
            await proxy.close()
        for replica in self.replicas:
            await replica.close()


class Proxy:
    """Passes bytes between an ingress and a replica until a connection is cut.

    Attributes:
        is_open: cleared, data waits here until it is set.
        on_data: called after each piece of data.
    """

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint)
        self._target = (url.hostname, url.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.on_data: Callable[[], None] = lambda: None
        self.num_connections = 0

    @classmethod
    async def open(cls, endpoint: str) -> Proxy:
        proxy = cls(endpoint)
        await proxy.listen()
        return proxy

    @property
    def endpoint(self) -> str:
        return f"tcp://{HOST}:{self._port}"

    async def listen(self) -> None:
        """Accept connections."""
        self._server = await asyncio.start_server(self._accept, HOST, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Cut everything and accept no connection, as a dead process."""
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections; what is on the way is lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        await self.refuse()
        await asyncio.sleep(0)  # connections that were accepted just now get their task
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            there, back = await asyncio.open_connection(*self._target)
        except (OSError, asyncio.CancelledError):  # cancelled at the end of the test
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except asyncio.CancelledError:  # at the end of the test
            pass
        finally:
            for stream in (writer, back):
                stream.transport.abort()
                self._writers.discard(stream)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()
                self.on_data()
        writer.transport.abort()
