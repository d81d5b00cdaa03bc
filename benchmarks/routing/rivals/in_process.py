"""Dynamo: the selection core of ai-dynamo-runtime, called in this process.

``SelectionService`` has the indexer, the accounting of slots, the queue and the selector that Dynamo's frontend uses,
and reads the same ``DYN_ROUTER_*`` variables. KV events reach it over ZMQ. Before each decision we wait until its index
shows a marker: a block that is published after the events, and removed with the next ones. First tokens and ends are
reported as the frontend does.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Sequence
from typing import Any

from dynamo._core import SelectionService, compute_block_hash_for_seq

from benchmarks.routing.rivals.kv_events import EventPublishers
from benchmarks.routing.rivals.prompts import Prompts, signed
from benchmarks.routing.rivals.side import Cluster, Events, Hashes, Placement, Request, main

__all__ = ["InProcessRouter"]

MODEL = "m"
PATIENCE_S = 10.0
SETTLE_S = 0.0007  # for the task of the queue, which runs beside us, to admit requests
_MARKER_HASHES, _MARKER_TOKENS = 1 << 40, 50_000_000  # where the markers' numbers begin
_MARKERS = 10_000_000  # for each replica


class InProcessRouter:
    """The core with its listeners."""

    reads = ("events",)
    version = importlib.metadata.version("ai-dynamo-runtime")

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.prompts = Prompts(cluster.block_size)
        self.publishers = EventPublishers(len(cluster.replicas), self.prompts)
        self.markers = [-1] * len(cluster.replicas)  # the last one of each replica
        self.content: dict[int, int] = {}  # hash -> Dynamo's hash of the block's tokens
        self.deciding: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.sizes: dict[int, int] = {}  # of the prompts of undecided requests, tokens
        self.has_queue = "DYN_ROUTER_QUEUE_THRESHOLD" in os.environ
        self.service = SelectionService(indexer_threads=1)

    @classmethod
    async def start(cls, cluster: Cluster, options: dict[str, Any]) -> InProcessRouter:
        """Register the replicas, and wait for the subscriptions."""
        router = cls(cluster)
        for number, endpoint in enumerate(router.publishers.endpoints):
            worker = {"worker_id": number, "model_name": MODEL, "endpoint": f"http://127.0.0.1:{number + 1}"}
            worker |= {"kv_events_endpoint": endpoint, "block_size": cluster.block_size}
            worker |= {"total_kv_blocks": cluster.cache_blocks, "max_num_batched_tokens": 2048}
            record = await router.service.upsert_worker(worker)
            if record["lifecycle"] != "schedulable":
                raise RuntimeError(f"Dynamo does not schedule worker {number}: {record}")
        await router.publishers.subscribed()
        await router._apply([])
        return router

    async def choose(self, request: Request, events: Sequence[Events]) -> list[Placement]:
        """Ask for a worker and reserve it."""
        for block in self.prompts.add(request):
            self.content[block] = self._content(self.prompts.block_tokens(block))
        if events:
            await self._apply(events)
        body = {"selection_id": str(request.job), **self._prompt(request.hashes, request.input_tokens)}
        self.sizes[request.job] = request.input_tokens
        self.deciding[request.job] = asyncio.ensure_future(self.service.select_and_reserve(body))
        return await self._placements()

    def _prompt(self, hashes: Hashes, tokens: int) -> dict[str, Any]:
        content = [self.content[block] for block in hashes]
        sequence = [signed(block) for block in hashes]
        return {"model_name": MODEL, "block_hashes": content, "sequence_hashes": sequence, "isl_tokens": tokens}

    async def _placements(self) -> list[Placement]:
        """Return the decisions, once each request is decided or waits in the router's queue.

        On its way through the core, a request is counted as waiting for a moment. So without a threshold, which makes
        the core queue requests, all are awaited, and with one, those that wait for ``SETTLE_S`` are taken to be queued.
        """
        begun = time.perf_counter()
        while self.deciding:
            await asyncio.sleep(0)
            waiting = sum(not decision.done() for decision in self.deciding.values())
            seconds = time.perf_counter() - begun
            if not waiting or (self.has_queue and seconds >= SETTLE_S and self._num_queued() == waiting):
                break
            if seconds > PATIENCE_S:
                raise TimeoutError(f"{waiting} requests are neither decided nor queued, {self._num_queued()} queued")
        done = [job for job, decision in self.deciding.items() if decision.done()]
        return [self._placement(job, self.deciding.pop(job).result()) for job in done]

    def _num_queued(self) -> int:
        return sum(model["pending_count"] for model in self.service.loads())

    def _placement(self, job: int, answer: dict[str, Any]) -> Placement:
        cached = (self.sizes.pop(job) - answer["effective_prefill_tokens"]) // self.cluster.block_size
        return Placement(job, self.cluster.replicas[answer["worker_id"]], int(cached))

    async def first_token(self, job: int) -> list[Placement]:
        """Report the end of a prefill."""
        await self.service.prefill_complete(str(job))
        return await self._placements()

    async def completed(self, job: int) -> list[Placement]:
        """Free the reservation."""
        await self.service.free_reservation(str(job))
        return await self._placements()

    # --- the index --------------------------------------------------------------------------------------------------

    async def _apply(self, events: Sequence[Events]) -> None:
        """Publish events and wait until the index has them. Without events: a marker for every replica."""
        batches = self.publishers.by_replica(events) or {number: [] for number in range(len(self.markers))}
        for replica, batch in batches.items():
            last = self.markers[replica]
            self.markers[replica] = marker = last + 1
            first_hash = _MARKER_HASHES + replica * _MARKERS
            if last >= 0:
                batch.append(self.publishers.removed([first_hash + last]))
            batch.append(self.publishers.stored([first_hash + marker], None, self._marker_tokens(marker)))
            self.publishers.publish(replica, batch)
        deadline = time.monotonic() + PATIENCE_S
        for replica in batches:
            while not await self._shows_marker(replica):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"events of worker {replica} were not applied within {PATIENCE_S} s")
                await asyncio.sleep(0)

    def _marker_tokens(self, marker: int) -> list[int]:
        return [_MARKER_TOKENS + marker] + [9] * (self.cluster.block_size - 1)

    async def _shows_marker(self, replica: int) -> bool:
        content = self._content(self._marker_tokens(self.markers[replica]))
        body = {"model_name": MODEL, "block_hashes": [content], "sequence_hashes": [content]}
        answer = await self.service.overlap_scores({**body, "isl_tokens": self.cluster.block_size})
        return any(row["worker_id"] == replica and row["device_blocks"] > 0 for row in answer["workers"])

    def _content(self, tokens: list[int]) -> int:
        return signed(compute_block_hash_for_seq(tokens, self.cluster.block_size)[0])

    # --- the end ----------------------------------------------------------------------------------------------------

    async def finish(self, events: Sequence[Events], cached: list[tuple[Hashes, list[int]]]) -> dict[str, Any]:
        """Compare the index with the true caches."""
        if events:
            await self._apply(events)
        wrong = 0
        for hashes, blocks in cached:
            answer = await self.service.overlap_scores(self._prompt(hashes, len(hashes) * self.cluster.block_size))
            wrong += sum(row["device_blocks"] != blocks[row["worker_id"]] for row in answer["workers"])
        active = sum(row["active_requests"] for model in self.service.loads() for row in model["loads"])
        if active:
            raise RuntimeError(f"Dynamo counts {active} active requests after the last one has ended")
        return {"checked_prompts": len(cached), "wrong_overlaps": wrong}

    async def close(self) -> None:
        """Shut the core down."""
        self.service.shutdown()
        self.publishers.close()


if __name__ == "__main__":
    main(InProcessRouter.start)
