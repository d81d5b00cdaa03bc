"""LiveView: the state of the cluster as JSON, for ``GET /live`` and the web page.

A visible page polls once a second; without a page nothing is collected. An ingress collects at most once a second,
however many pages are open: a snapshot of every engine, and the last routed requests of every ingress, so that all
ingresses give the same answer.

    {"time": 1700000000.1,                         Unix seconds of the collection
     "model": "pagoda-demo",                       the served name
     "replicas": [{
       "name": "abc",
       "running": 3, "waiting": 0, "swapped": 0,   sequences
       "prompt_tokens": 9, "generated_tokens": 9,  since the replica started
       "query_tokens": 9, "hit_tokens": 9,         looked up, and found, in the prefix cache
       "evicted_blocks": 0, "preemptions": 0,
       "blocks": {"free": 1, "cached": 1, "used": 2, "shared": 1},   shared is a part of used
       "num_blocks": 4, "blocks_per_cell": 1,
       "cells": "AQAA...",                         base64 of BlockMap.cells: three bytes per cell
       "tiers": [{                                 beyond the device: host, disk, shared, peer; those that it has
         "name": "host",
         "blocks": 9, "num_blocks": 20,            what it holds, and has room for; 0 of peers
         "hit_tokens": 9,                          prompt tokens that came from there and were not computed
         "in_tokens": 9, "out_tokens": 9           whose KV came from there, and went there, since the start
       }]
     }],
     "routed": [{"time": 1700000000.0, "ingress": "def", "replica": "abc", "outcome": "hit",
       "prompt_tokens": 90, "predicted_tokens": 64, "best_tokens": 64,
       "queue_s": 0.1, "prefill_s": 0.02, "others_s": 0.01, "decode_s": 0.03,   the parts of its cost
       "next_s": 0.2,
       "source": "ghi", "fetched_tokens": 0, "fetch_s": 0.0,
       "predicted_s": 0.12, "measured_s": 0.15}],  until the first token; the latest request first
     "transfers": [{                               KV that replicas read from others, now and in the last minute
       "time": 1700000000.0, "seconds": 0.02,      when it began, and how long it took, or has taken so far
       "source": "abc", "target": "def",           replicas; of a source that has gone its address
       "tokens": 512, "bytes": 4194304, "is_running": false}]}             the latest first

It knows neither Serve nor HTTP: the caller passes what queries the engines and the ingresses.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from deployments.observability.recorder import Series
from deployments.routing.recently_routed import LENGTH, RoutedRequest
from deployments.transport.pages.transfer_log import Transfer
from engine.kv.block_map import BlockMap
from engine.observability.load import EngineStats
from engine.observability.metrics import (
    BLOCKS_EVICTED,
    CACHE_HITS,
    CACHE_QUERIES,
    GENERATION_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    TIER_BLOCKS,
    TIER_CAPACITY,
    TIER_HITS,
    TIER_TOKENS,
    Metric,
)

__all__ = ["EngineSnapshot", "LiveReplicas", "LiveView", "TierSnapshot"]

FRESH_S = 0.9  # less than the page's polling period, else every second poll would get old data

_COUNTERS: dict[str, Metric] = {
    "prompt_tokens": PROMPT_TOKENS,
    "generated_tokens": GENERATION_TOKENS,
    "query_tokens": CACHE_QUERIES,
    "hit_tokens": CACHE_HITS,
    "evicted_blocks": BLOCKS_EVICTED,
    "preemptions": PREEMPTIONS,
}
_TIERS = ("host", "disk", "shared", "peer")


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """The state of one tier of an engine's KV cache, with the fields of the JSON. It pickles."""

    name: str
    blocks: int
    num_blocks: int
    hit_tokens: int
    in_tokens: int
    out_tokens: int

    @classmethod
    def take(cls, name: str, series: Iterable[Series]) -> TierSnapshot:
        """Make a snapshot of a tier from an engine's metrics."""
        values = {(item.metric.name, item.labels): int(item.value) for item in series}
        keys: list[tuple[Metric, tuple[str, ...]]] = [
            (TIER_BLOCKS, (name,)),
            (TIER_CAPACITY, (name,)),
            (TIER_HITS, (name,)),
        ]
        keys += [(TIER_TOKENS, (name, "in")), (TIER_TOKENS, (name, "out"))]
        return cls(name, *(values.get((metric.name, labels), 0) for metric, labels in keys))

    @property
    def is_used(self) -> bool:
        """Whether the engine has this tier: it has room, or something has moved."""
        return bool(self.num_blocks or self.in_tokens or self.out_tokens)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of one engine. It pickles."""

    stats: EngineStats
    counters: Mapping[str, int]  # by their JSON keys
    blocks: BlockMap
    tiers: tuple[TierSnapshot, ...] = ()
    endpoint: str = ""  # where the replica serves pages
    transfers: tuple[Transfer, ...] = ()  # of pages from others to it

    @classmethod
    def take(cls, stats: EngineStats, series: Iterable[Series], blocks: BlockMap) -> EngineSnapshot:
        """Make a snapshot; the counters are summed over ``series``."""
        totals: Counter[str] = Counter()
        series = list(series)
        for item in series:
            totals[item.metric.name] += int(item.value) if item.metric.kind == "counter" else 0
        counters = {name: totals[metric.name] for name, metric in _COUNTERS.items()}
        tiers = (TierSnapshot.take(name, series) for name in _TIERS)
        return cls(stats, counters, blocks, tuple(tier for tier in tiers if tier.is_used))

    def as_json(self, name: str) -> dict[str, Any]:
        """Return the element of ``replicas`` for this replica."""
        return {
            "name": name,
            "running": self.stats.num_running,
            "waiting": self.stats.num_waiting,
            "swapped": self.stats.num_swapped,
            **self.counters,
            "blocks": asdict(self.blocks.counts()),
            "num_blocks": self.blocks.num_blocks,
            "blocks_per_cell": self.blocks.blocks_per_cell,
            "cells": base64.b64encode(self.blocks.cells).decode(),
            "tiers": [asdict(tier) for tier in self.tiers],
        }


class LiveReplicas(Protocol):
    """Queries the replicas of the application. Each result is that of those that answer in time, by their names."""

    async def live(self) -> Mapping[str, EngineSnapshot]:
        """Return the present state of each engine."""

    async def recently_routed(self) -> Mapping[str, Sequence[RoutedRequest]]:
        """Return where each ingress has sent its last requests."""


class LiveView:
    """The cached state of the cluster, shared by all pages of one ingress.

    Args:
        model: the served name.
        replicas: returns the state of the engines, and the last routed requests of the ingresses.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        replicas: LiveReplicas,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._replicas = replicas
        self._clock = clock
        self._lock = asyncio.Lock()
        self._taken = float("-inf")
        self._body = b""

    async def body(self) -> bytes:
        """Return the JSON, not older than ``FRESH_S``."""
        async with self._lock:  # concurrent calls wait for the same collection
            if self._clock() - self._taken > FRESH_S:
                engines, ingresses = await asyncio.gather(self._replicas.live(), self._replicas.recently_routed())
                self._body, self._taken = self._encode(engines, ingresses), self._clock()
            return self._body

    def _encode(self, engines: Mapping[str, EngineSnapshot], ingresses: Mapping[str, Sequence[RoutedRequest]]) -> bytes:
        routed = [asdict(request) | {"ingress": name} for name, requests in ingresses.items() for request in requests]
        routed.sort(key=lambda item: float(item["time"]), reverse=True)
        content = {
            "time": time.time(),
            "model": self._model,
            "replicas": [snapshot.as_json(name) for name, snapshot in sorted(engines.items())],
            "routed": routed[:LENGTH],
            "transfers": _transfers(engines),
        }
        return json.dumps(content, separators=(",", ":")).encode()


def _transfers(engines: Mapping[str, EngineSnapshot]) -> list[dict[str, Any]]:
    """Return the elements of ``transfers``."""
    names = {snapshot.endpoint: name for name, snapshot in engines.items()}
    transfers = []
    for target, snapshot in engines.items():
        for transfer in snapshot.transfers:
            item = asdict(transfer)
            endpoint = item.pop("endpoint")
            transfers.append(item | {"source": names.get(endpoint, endpoint), "target": target})
    return sorted(transfers, key=lambda item: float(item["time"]), reverse=True)[:LENGTH]
