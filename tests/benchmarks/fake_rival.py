"""A rival's side with a router of its own: MODE SOCKET. It goes round robin, with a fault or a queue."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.routing.rivals.side import Cluster, Events, Hashes, Placement, Request, main

FAULTY = 5  # the request that a fault hits
MAX_IN_FLIGHT = 6  # of the mode `queue`: requests that are placed and have not ended
MAX_PREFILLS = 1  # of the mode `one prefill`: requests that are placed and have no first token


class FakeRouter:
    reads = ("events", "loads")
    version = "0"

    def __init__(self, cluster: Cluster, mode: str) -> None:
        self.cluster, self.mode = cluster, mode
        self.turn = self.in_flight = self.prefills = 0
        self.max_in_flight = MAX_IN_FLIGHT if mode == "queue" else 10_000
        self.max_prefills = MAX_PREFILLS if mode == "one prefill" else 10_000
        self.queue: deque[int] = deque()
        self.cached: list[set[int]] = [set() for _ in cluster.replicas]

    async def choose(self, request: Request, events: Sequence[Events]) -> list[Placement]:
        self.apply(events)
        assert len(self.cluster.loads) == len(self.cluster.replicas)
        if request.job == FAULTY:
            if self.mode == "keep":
                return []
            if self.mode == "hang":
                await asyncio.sleep(3600)
            if self.mode == "die":
                print("out of luck", flush=True)
                os._exit(3)
            if self.mode == "raise":
                raise ValueError("no worker is healthy")
            if self.mode == "unknown replica":
                return [Placement(request.job, "replica-99")]
            if self.mode == "unknown request":
                return [Placement(10_000, self.cluster.replicas[0])]
            if self.mode == "no object":
                return [17]  # type: ignore[list-item]
        self.queue.append(request.job)
        return self.place()

    def place(self) -> list[Placement]:
        placed = []
        while self.queue and self.in_flight < self.max_in_flight and self.prefills < self.max_prefills:
            self.in_flight += 1
            self.prefills += 1
            self.turn += 1
            placed.append(
                Placement(self.queue.popleft(), self.cluster.replicas[self.turn % len(self.cluster.replicas)])
            )
        return placed

    async def first_token(self, job: int) -> list[Placement]:
        self.prefills -= 1
        return self.place()

    async def completed(self, job: int) -> list[Placement]:
        self.in_flight -= 1
        return self.place()

    def apply(self, events: Sequence[Events]) -> None:
        for replica, stored, removed in events:
            self.cached[replica].update(stored)
            self.cached[replica].difference_update(removed)

    async def finish(self, events: Sequence[Events], cached: list[tuple[Hashes, list[int]]]) -> dict[str, Any]:
        self.apply(events)
        wrong = sum(
            blocks[replica] != next((depth for depth, block in enumerate(hashes) if block not in known), len(hashes))
            for hashes, blocks in cached
            for replica, known in enumerate(self.cached)
        )
        return {"checked_prompts": len(cached), "wrong_overlaps": wrong, "in_flight": self.in_flight}

    async def close(self) -> None:
        pass


async def start(cluster: Cluster, options: dict[str, Any]) -> FakeRouter:
    return FakeRouter(cluster, sys.argv[1])


if __name__ == "__main__":
    main(start)
