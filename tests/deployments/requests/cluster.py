"""A cluster in this process: engines with request channels and page transfers, and an ingress that sends to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from time import monotonic
from typing import Any

from msgspec.structs import replace

from deployments.requests.dispatcher import Dispatcher
from deployments.requests.generation import Generation
from deployments.requests.prompt import Prompt
from deployments.routing.cluster_view import ClusterView
from deployments.transport.kv_events.messages import REMOVED, STORED, events_message
from deployments.transport.request_channel.server import ChannelServer
from engine.kv.events import KVEventBatch
from engine.kv.prefix_hash import hash_blocks
from engine.observability.load import EngineLoad
from engine.outputs import StepOutputs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import FakeText
from tests.deployments.transport.pages.fakes import HOST
from tests.deployments.transport.pages.nodes import BLOCK_SIZE, Node
from tests.waiting import HANG_S, until_in_loop

SLOW = 200.0  # prompt tokens a second that these engines claim to compute, so that a transfer is worth its while


class ReplicaNode(Node):
    """A node that takes requests from an ingress, and reports to its view as a publisher does."""

    def __init__(self, path: str, name: str, view: ClusterView, **options: Any) -> None:
        super().__init__(path, **options)
        self.name = name
        self._view = view
        self.server = ChannelServer(self.engine, HOST, max_requests=100, on_copy=self.transfer.copy)
        self.is_dead = False
        self._num_steps, self._max_steps = 0, inf
        self._real_step, self.inner.step = self.inner.step, self._step  # type: ignore[method-assign]
        self.on_events = self._report
        self.on_load = self._report_load

    def hold_after(self, num_steps: int) -> None:
        """Stop computing after ``num_steps`` steps until ``go_on``: a stream cannot end before it is disturbed.

        Only what must be copied to the host for another replica is, by a step each.
        """
        self._max_steps = self._num_steps + num_steps

    def go_on(self) -> None:
        self._max_steps = inf

    def _step(self) -> StepOutputs:
        if self._num_steps >= self._max_steps and not self.tiers.needs_step:
            time.sleep(0.001)
            return StepOutputs()
        self._num_steps += 1
        return self._real_step()

    @property
    def metadata(self) -> dict[str, Any]:
        pages = self.transfer.address.metadata
        return {"block_size": BLOCK_SIZE, **pages, **self.server.address.metadata}

    @property
    def num_requests(self) -> int:
        return self.server.num_requests

    def resumed(self, kv: str) -> float:
        return self.count("resumed_tokens", kv)

    def _report(self, batch: KVEventBatch) -> None:
        for kind, hashes in events_message(batch, 0.0).changes():
            if kind == STORED:
                self._view.routing.stored(self.name, hashes)
            elif kind == REMOVED:
                self._view.routing.removed(self.name, hashes)

    def _report_load(self, load: EngineLoad) -> None:
        self._view.routing.report(self.name, replace(load, prefill_tokens_per_s=SLOW), now=monotonic())

    async def kill(self) -> None:
        """End at once: nothing listens any more, and no output is sent."""
        if not self.is_dead:
            self.is_dead = True
            self.on_events, self.on_load = lambda batch: None, lambda load: None
            self.server._reader.close()
            self.engine.call_in_step_thread(lambda: self.server._outputs.close(0))
            self.engine.end_all(lambda: RuntimeError("killed"))
            self.go_on()
            await self.close()
            self.server._timer.cancel()
            self.server._context.term()


class Cluster:
    """An ingress and its replicas. Each replica's block hashes are those of the same model."""

    def __init__(
        self, path: str, names: str, kv_replication: int | None = None, stall_timeout_s: float = HANG_S, **options: Any
    ) -> None:
        self.view = ClusterView()
        self.replicas = {name: ReplicaNode(path, name, self.view, **options) for name in names}
        self.dispatcher = Dispatcher(
            self.view,
            self._wake,
            max_requests=100,
            stall_timeout_s=stall_timeout_s,
            request_timeout_s=HANG_S,
            kv_replication=kv_replication,
        )
        self._num_requests = 0

    async def _wake(self) -> None:
        await asyncio.sleep(HANG_S)

    async def start(self) -> None:
        self.dispatcher.start()
        await self.set_replicas(*self.replicas)
        for name, replica in self.replicas.items():
            self.view.routing.replaced(name, replica.reported)
            replica.on_load(replica.engine.load())

    async def set_replicas(self, *names: str) -> None:
        """List replicas, and wait until they take requests."""
        self.view.set_replicas({name: self.replicas[name].metadata for name in names})
        links = self.dispatcher._links
        assert links is not None
        await until_in_loop(lambda: sorted(links.ready) == sorted(names))

    def num_held_tokens(self, generation: Generation, *names: str) -> int:
        """Return how many tokens of a prompt and its answer any of these replicas has reported to hold."""
        request = generation.prompt.request
        text = [*request.prompt_token_ids, *generation.token_ids]
        with self.view.routing.lock:
            held = self.view.routing.index.num_cached_blocks(hash_blocks(text, BLOCK_SIZE, generation.prompt.root))
        return BLOCK_SIZE * max((held.get(name, 0) for name in names), default=0)

    def generation(self, prompt_ids: list[int], params: SamplingParams) -> Generation:
        self._num_requests += 1
        request = EngineRequest(f"r{self._num_requests}", prompt_ids, params)
        model = next(iter(self.replicas.values())).inner.info.model
        root = request.cache_root(model)
        prompt = Prompt(request, hash_blocks(prompt_ids, BLOCK_SIZE, root), root=root, block_size=BLOCK_SIZE)
        text: Any = FakeText()
        return Generation(self.dispatcher, request, prompt, text, max_migrations=100)

    def serving(self, generation: Generation) -> ReplicaNode:
        """Return the replica that answers now."""
        return self.replicas[generation.attempts[-1].replica]

    async def close(self) -> None:
        self.dispatcher.close()
        for replica in self.replicas.values():
            await replica.kill()


class Stream:
    """A client that reads an answer."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> list[int]:
        async for _ in self.generation.deltas():
            pass
        return self.generation.token_ids

    async def until(self, num_tokens: int) -> None:
        """Wait until that many tokens have come."""
        await until_in_loop(lambda: len(self.generation.token_ids) >= num_tokens or self.task.done())
        assert not self.task.done(), "the stream has ended before it could be disturbed"


@asynccontextmanager
async def cluster(path: str, names: str, **options: Any) -> AsyncIterator[Cluster]:
    """Run a cluster inside the ``async with`` block."""
    running = Cluster(path, names, **options)
    try:
        await running.start()
        yield running
    finally:
        await running.close()
