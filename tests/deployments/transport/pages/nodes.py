"""Nodes: real engines with page transfers in this process, which answer requests that name each other as sources."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from deployments.observability.recorder import Recorder
from deployments.transport.pages.transfer import PageTransfer
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.events import BlockRemoved, BlockStored, KVEventBatch
from engine.observability.load import EngineLoad
from engine.observability.metrics import METRICS
from engine.request import EngineRequest, KVSource
from engine.sampling_params import SamplingParams
from tests.deployments.transport.pages.fakes import HOST, counts
from tests.engine.async_streams import collect, stream, wait_until_idle
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def save(family: str, path: Path) -> str:
    """Save a tiny model: qwen3 attends to everything, mistral to a window, qwen3.5 has recurrent layers."""
    if family == "qwen3.5":
        return save_recurrent_model(family, path)[1]
    return save_checkpoint(build_model(family), path)


def prompt_of(length: int, seed: int = 7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 384) for _ in range(length)]


class Node:
    """An engine with its transfer, which takes a request's tokens from another node if it is told to.

    Args:
        path: of the model.
        options: of the engine.
    """

    def __init__(self, path: str, **options: Any) -> None:
        fixed: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "num_threads": 1}
        fixed |= {"max_decode_slowdown": None, "block_size": BLOCK_SIZE, "num_blocks": 200, "swap_space_gib": 0.01}
        self.recorder = Recorder(METRICS)
        self.events: list[KVEventBatch] = []
        self.on_events: Callable[[KVEventBatch], None] = lambda batch: None
        self.on_load: Callable[[EngineLoad], None] = lambda load: None
        config = EngineConfig.from_options(path, fixed | options)
        self.inner = Engine.from_config(config, sink=self.recorder, on_kv_events=self._publish)
        self.engine = AsyncEngine(self.inner, on_load=lambda load: self.on_load(load))
        assert self.inner.tiers is not None
        self.tiers = self.inner.tiers
        self.transfer = PageTransfer(self.engine, self.tiers, HOST, self.recorder)
        self.transfer.wait_until_open()
        self._num_requests = 0

    def _publish(self, batch: KVEventBatch) -> None:
        self.events.append(batch)
        self.on_events(batch)

    def source(self, num_tokens: int) -> KVSource:
        return KVSource(self.transfer.address.endpoint, self.transfer.address.secret, num_tokens)

    def request(
        self, prompt: list[int], params: SamplingParams = GREEDY, source: KVSource | None = None, **fields: Any
    ) -> EngineRequest:
        self._num_requests += 1
        return EngineRequest(f"r{self._num_requests}", prompt, params, kv_source=source, **fields)

    async def answer(self, prompt: list[int], *args: Any, **fields: Any) -> list[int]:
        """Answer a prompt; afterwards nothing may be left of it."""
        tokens = await collect(stream(self.engine, self.request(prompt, *args, **fields)))
        await wait_until_idle(self.engine)
        return tokens

    def count(self, name: str, *labels: str) -> float:
        """Return the value of a metric."""
        return counts(self.recorder, name).get(labels, 0.0)

    @property
    def num_fetched(self) -> float:
        """Tokens that have come from other nodes."""
        return self.count("kv_tier_tokens", "peer", "in")

    @property
    def failures(self) -> dict[tuple[str, ...], float]:
        return counts(self.recorder, "kv_tier_failures")

    @property
    def reported(self) -> set[int]:
        """The hashes that the node's events say it has."""
        hashes: set[int] = set()
        for batch in self.events:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    hashes.add(event.block_hash)
                elif isinstance(event, BlockRemoved):
                    hashes.discard(event.block_hash)
        return hashes

    def bits(self, prompt: list[int], num_blocks: int) -> list[torch.Tensor]:
        """Return the bits of the first blocks of a prompt, in the layers that attend to everything."""
        match = self.inner.block_manager.prefix_cache.match(self.tiers.chain(prompt, ""))
        blocks = [match.block_id(index) for index in range(num_blocks)]
        assert -1 not in blocks
        cache = self.inner.runner.workers.local.kv_cache  # type: ignore[attr-defined]
        return [part[blocks].contiguous().view(torch.uint8).clone() for part in cache.blocks.parts]

    def is_clean(self) -> bool:
        """Whether no page is pinned or lent."""
        pools = self.tiers.pages.pools
        return not self.tiers.departures.num_leases and all(pool.num_free == pool.num_pages for pool in pools)

    async def close(self) -> None:
        await self.engine.shutdown()
        self.transfer.close()
        self.inner.block_manager.check_integrity([])


@asynccontextmanager
async def nodes(path: str, number: int = 2, *each: dict[str, Any], **options: Any) -> AsyncIterator[list[Node]]:
    """Make nodes; the options of each may differ."""
    running = [Node(path, **options, **(each[index] if index < len(each) else {})) for index in range(number)]
    try:
        yield running
    finally:
        for node in running:
            await node.close()
