"""EngineReplica: the Serve deployment of one engine.

Requests, as token ids, come over the channel and tokens go back there; Serve's own calls are for control. It knows
neither text nor HTTP, nor why a request was sent to it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve

from deployments.observability.ray_exporter import RayExporter
from deployments.observability.recorder import Recorder, Series
from deployments.observability.stats_line import StatsLine
from deployments.serve.autoscaling import replica_pressure
from deployments.serve.cpu_priority import in_yielding_thread
from deployments.serve.grace import Grace
from deployments.serve.rank_actors import hosts_of_ranks
from deployments.transport.kv_events.publisher import KVEventPublisher
from deployments.transport.pages.transfer import PageTransfer
from deployments.transport.replica_metadata import BLOCK_SIZE, ENDPOINT
from deployments.transport.request_channel.server import ChannelServer
from deployments.web.live_view import EngineSnapshot
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, EngineInfo
from engine.engine import Engine
from engine.kv.tiers.copies import CopyOrder
from engine.kv.tiers.tiers import Tiers
from engine.observability.logs import forward_logs
from engine.observability.metrics import METRICS
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

__all__ = ["EngineReplica"]

logger = logging.getLogger("ray.serve")

HANDED_OVER_QUIET_S = 2.0  # without a transfer, after which the streams that were handed over have what they need
LEAVING_QUIET_S = 0.5  # likewise, after which the neighbours have what only this replica holds
MAX_LENDING_S = 10.0  # that a replica without requests lends pages before it ends


class EngineReplica:
    """The user class of the engine deployment.

    Args:
        config: the engine's options.
        max_requests: unfinished requests that it takes; further ones wait in the ingresses.
        pooling: further options of an engine that computes embeddings or scores; None: it generates text.
        graceful_shutdown_s: after which Serve kills a replica that shuts down.
        kv_replication: ``router.kv_replication``, which has no effect if this replica exchanges no KV pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_requests: int,
        pooling: PoolingConfig | None = None,
        *,
        graceful_shutdown_s: float = 600.0,
        kv_replication: int | None = None,
    ) -> None:
        forward_logs(logger)  # first: the engine logs while it loads
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._graceful_shutdown_s = graceful_shutdown_s
        self._kv_replication = kv_replication
        self._recorder = Recorder(METRICS)
        # This node's address in the cluster: ingresses on other nodes connect to it.
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._publisher = KVEventPublisher(self._name, host)
        self._tiers: Tiers | None = None
        self._engine = in_yielding_thread(config, partial(self._start_engine, config, pooling, host))
        # Serve calls the constructor on the event loop that runs this replica's code.
        self._transfer = self._start_transfer(config, host)
        self._channel = ChannelServer(
            self._engine,
            host,
            max_requests=max_requests,
            on_hashes=self._publisher.publish_awaited,
            on_copy=self._copy,
        )
        self._exporter = RayExporter(self._recorder, label="replica")
        self._exporter.start()
        self._stats_line = StatsLine(self._recorder)
        self._stats_line.start()
        gc.freeze()  # these objects stay: a garbage collection that traverses them would delay every stream
        logger.info("engine ready: %s", self._engine.info)

    def _start_engine(self, config: EngineConfig, pooling: PoolingConfig | None, host: str) -> AsyncEngine:
        if pooling is not None:
            pools = PoolingEngine.from_config(config, pooling, sink=self._recorder)
            return AsyncEngine(pools, on_load=self._publisher.publish_load)
        hosts, publish = hosts_of_ranks(config, host), self._publisher.publish_events
        engine = Engine.from_config(config, sink=self._recorder, on_kv_events=publish, hosts=hosts)
        self._tiers = engine.tiers
        started = AsyncEngine(engine, on_load=self._publisher.publish_load)
        started.load_grammar_compiler()
        return started

    def _start_transfer(self, config: EngineConfig, host: str) -> PageTransfer | None:
        """Exchange KV pages with the other replicas, if the engine has a host pool and the options allow it."""
        if self._tiers is None or config.kv_transfer is False:
            if self._kv_replication is not None:
                logger.warning(
                    "router.kv_replication=%d has no effect: this replica exchanges no KV pages; set "
                    "engine.swap_space_gib and engine.kv_transfer, or remove it",
                    self._kv_replication,
                )
            return None
        return PageTransfer(self._engine, self._tiers, host, self._recorder)

    def _copy(self, order: CopyOrder) -> None:
        """Read the KV of a text from another replica."""
        if self._transfer is not None:
            self._transfer.copy(order)

    async def info(self) -> EngineInfo:
        """Return the engine's description: block size, context length, vocabulary and the like."""
        return self._engine.info

    async def metrics(self) -> tuple[str, list[Series]]:
        """Return this replica's name and the current value of every metric."""
        return self._name, self._recorder.snapshot()

    async def live(self) -> tuple[str, EngineSnapshot]:
        """Return this replica's name and its snapshot for the web page."""
        stats, blocks = self._engine.stats(), await self._engine.block_map()
        snapshot = EngineSnapshot.take(stats, self._recorder.snapshot(), blocks)
        if self._transfer is not None:
            endpoint, transfers = self._transfer.address.endpoint, self._transfer.recent()
            snapshot = replace(snapshot, endpoint=endpoint, transfers=transfers)
        return self._name, snapshot

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata that Serve passes to every router once this replica is ready."""
        blocks = {BLOCK_SIZE: self._engine.info.block_size} if self._engine.info.num_blocks else {}
        pages = {} if self._transfer is None else self._transfer.address.metadata
        return {ENDPOINT: self._publisher.endpoint, **blocks, **pages, **self._channel.address.metadata}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers that the autoscaling policy reads."""
        return replica_pressure(self._engine.load())

    async def check_health(self) -> None:
        """Raise if the engine is dead or stuck in a step; Serve then replaces this replica."""
        self._engine.check_health()

    async def __del__(self) -> None:
        """Shut down after the last request. Serve calls this, and limits its time, when it stops the replica.

        Shortly before the end, requests that have not ended are handed over to other replicas, which read their KV
        from this one. Serve also calls it if the constructor has failed.
        """
        if hasattr(self, "_exporter"):
            await self._drain(Grace(self._graceful_shutdown_s))
            self._stats_line.stop()
            self._exporter.stop()
            await self._engine.shutdown()
            if self._transfer is not None:
                await asyncio.to_thread(self._transfer.close)
            self._channel.close()
            self._publisher.close()

    async def _drain(self, grace: Grace) -> None:
        """Let requests end or hand them over, and lend pages to the replicas that continue them."""
        await asyncio.to_thread(grace.ask)
        logger.info("the engine shuts down within %.1f s", grace.seconds)
        asking = asyncio.create_task(grace.keep_asking())
        try:
            num_handed_over = await self._channel.drain(lambda: grace.hand_over_in_s)
        finally:
            asking.cancel()
        if num_handed_over:
            logger.info("%d unfinished requests are handed over to other replicas", num_handed_over)
        if self._transfer is not None:
            quiet_s = HANDED_OVER_QUIET_S if num_handed_over else LEAVING_QUIET_S
            await asyncio.to_thread(self._transfer.drain, quiet_s, min(MAX_LENDING_S, grace.lending_s))
