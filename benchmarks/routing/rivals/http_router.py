"""vllm-router and SMG over HTTP: servers between a client and fake engines, all of them on the loopback interface.

Each simulated request is a streaming HTTP request. The engine that it reaches is the decision; the simulation says when
the first chunk and the end are sent, and goes on when the client has received them. So the router sees connections and
requests in flight as of the simulated time. vllm-router's ``kv_aware`` also reads KV events over ZMQ; each decision
waits until its log says that it has applied them. SMG's timers run in real time: see ``Pace`` in side.py.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp

from benchmarks.routing.rivals import commands
from benchmarks.routing.rivals.answers import Answer, Answers
from benchmarks.routing.rivals.http_engines import HttpEngines
from benchmarks.routing.rivals.kv_events import EventPublishers
from benchmarks.routing.rivals.prompts import Prompts
from benchmarks.routing.rivals.router_server import RouterServer, free_port
from benchmarks.routing.rivals.side import Cluster, Events, Hashes, Placement, Request, main

__all__ = ["HttpRouter"]

PATIENCE_S = 30.0  # for the router to pass something on
SETTLE_S = 0.0003  # for the router to count a request out after the client has its end
_LAST_TOKEN = 60_000_000  # + job: after the full blocks of a prompt
_T = TypeVar("_T")
_APPLIED = re.compile(r"live sequence advanced.*127\.0\.0\.1:(\d+) .*seq=(\d+)")


class HttpRouter:
    """The router, its engines and its client."""

    session: aiohttp.ClientSession

    def __init__(self, cluster: Cluster, options: dict[str, Any]) -> None:
        self.cluster, self.options = cluster, options
        self.reads = tuple(options.get("reads", ()))
        self.version = _version(options["package"])
        self.prompts = Prompts(cluster.block_size)
        self.answers = Answers()
        self._sending: set[asyncio.Task[None]] = set()
        self.engines = self.make_engines()
        self.port = free_port()
        self.server = RouterServer(self.port, self._on_line)
        self.publishers = self._make_publishers()
        self.applied = [-1] * len(cluster.replicas)  # last event batch of each replica that the router has applied
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of applied batches
        self.patience_s: float = options.get("patience_s", PATIENCE_S)

    @classmethod
    async def start(cls, cluster: Cluster, options: dict[str, Any]) -> HttpRouter:
        """Start engines and router."""
        router = cls(cluster, options)
        connector = aiohttp.TCPConnector(limit=0)
        router.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            await router.engines.start()
            await router.server.start(router.command(), router.session, len(cluster.replicas))
            if router.publishers is not None:
                await router.publishers.subscribed()
        except BaseException:
            await router.close()
            raise
        return router

    def make_engines(self) -> Any:
        """Return the fake engines."""
        return HttpEngines(self.cluster, self.answers)

    def _make_publishers(self) -> EventPublishers | None:
        return EventPublishers(len(self.cluster.replicas), self.prompts) if "events" in self.reads else None

    def command(self) -> list[str]:
        """Return the router's command line."""
        if self.options["package"] == "smg":
            return commands.smg(self.options, self.port, self.engines.urls)
        endpoints = self.publishers.endpoints if self.publishers else []
        return commands.vllm_router(self.options, self.port, self.engines.urls, endpoints, self.cluster.block_size)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def choose(self, request: Request, events: Sequence[Events]) -> list[Placement]:
        """Send a request; the engine that it reaches is the router's choice."""
        self.prompts.add(request)
        await self.publish(events)
        answer = self.answers.by_job[request.job] = Answer()
        self._sending.add(task := asyncio.ensure_future(self._send(answer, self.body(request))))
        task.add_done_callback(self._sending.discard)
        engine = await self._passed(answer.arrived, f"request {request.job} to an engine")
        return [Placement(request.job, self.cluster.replicas[engine])]

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request to the router."""
        prompt: str | list[int]
        if self.options["prompt"] == "text":
            prompt = self.prompts.text(request)
        else:
            prompt = self.prompts.tokens(request, _LAST_TOKEN + request.job)
        body: dict[str, Any] = self.engines.body(request.job, prompt, request.output_tokens)
        return body

    async def _send(self, answer: Answer, body: dict[str, Any]) -> None:
        try:
            async with self.session.post(self.server.url + self.engines.path, json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"the router answered {response.status}: {(await response.text())[:300]}")
                async for chunk in response.content.iter_any():
                    if b"data:" in chunk and not answer.first_received.done():
                        answer.first_received.set_result(None)
            answer.end_received.set_result(None)
        except Exception as error:
            answer.fail(error)

    async def first_token(self, job: int) -> list[Placement]:
        """Send the first chunk."""
        answer = self.answers.by_job[job]
        answer.first_sent.set()
        await self._passed(answer.first_received, f"the first token of request {job}")
        return []

    async def completed(self, job: int) -> list[Placement]:
        """Send the end of the answer."""
        answer = self.answers.by_job.pop(job)
        answer.end_sent.set()
        await self._passed(answer.end_received, f"the end of request {job}")
        await asyncio.sleep(SETTLE_S)
        return []

    async def _passed(self, future: asyncio.Future[_T], what: str) -> _T:
        """Return what a future brings.

        Raises:
            TimeoutError: if the router does not pass it on.
        """
        try:
            return await asyncio.wait_for(future, self.patience_s)
        except TimeoutError:
            raise TimeoutError(f"the router has not passed on {what} within {self.patience_s} s") from None

    # --- KV events --------------------------------------------------------------------------------------------------

    async def publish(self, events: Sequence[Events]) -> None:
        """Publish events, and wait until the router has applied them."""
        if self.publishers is None:
            return
        for replica, batch in self.publishers.by_replica(events).items():
            self.publishers.publish(replica, batch)
        while any(done < count - 1 for done, count in zip(self.applied, self.publishers.num_batches, strict=True)):
            self.news = asyncio.get_running_loop().create_future()
            await self._passed(self.news, "KV events to its index")

    def _on_line(self, line: str) -> None:
        if match := _APPLIED.search(line):
            replica = next(n for n, url in enumerate(self.engines.urls) if url.endswith(f":{match[1]}"))
            self.applied[replica] = max(self.applied[replica], int(match[2]))
            if not self.news.done():
                self.news.set_result(None)
        elif "DEBUG" not in line:
            print(line, flush=True)

    async def finish(self, events: Sequence[Events], cached: list[tuple[Hashes, list[int]]]) -> dict[str, Any]:
        """Report what else the router asked of the engines."""
        return {"repeated_requests": self.answers.num_repeated, "other_calls": dict(self.answers.other_calls)}

    async def close(self) -> None:
        """End the router, then the engines."""
        await self.server.close()
        await self.session.close()
        await self.engines.close()
        if self.publishers is not None:
            self.publishers.close()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main(HttpRouter.start)
