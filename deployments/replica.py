"""EngineReplica: the Serve deployment of one engine.

It takes requests as token ids and streams tokens back; a call that is cancelled aborts its sequence. It knows neither
text nor HTTP, nor why the router has chosen it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import ray
from ray import serve

from deployments.autoscaling import replica_pressure
from deployments.observability.ray_exporter import RayExporter
from deployments.observability.recorder import Recorder, Series
from deployments.observability.stats_line import StatsLine
from deployments.web.live_view import EngineSnapshot
from deployments.wire.publisher import KVEventPublisher
from deployments.wire.replica_metadata import BLOCK_SIZE, ENDPOINT
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, EngineInfo
from engine.engine import Engine
from engine.errors import EngineDeadError, OverloadedError
from engine.observability.logs import forward_logs
from engine.observability.metrics import METRICS
from engine.outputs import EngineOutput
from engine.request import EngineRequest

__all__ = ["EngineReplica"]

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """The user class of the engine deployment."""

    def __init__(self, config: EngineConfig) -> None:
        forward_logs(logger)  # first: the engine logs while it loads
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._recorder = Recorder(METRICS)
        # Bound to this node's address in the cluster: routers on other nodes subscribe.
        self._publisher = KVEventPublisher(self._name, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        engine = Engine.from_config(config, sink=self._recorder, on_kv_events=self._publisher.publish_events)
        self._engine = AsyncEngine(engine, on_load=self._publisher.publish_load, replica=self._name)
        self._exporter = RayExporter(self._recorder, label="replica")
        self._exporter.start()
        self._stats_line = StatsLine(self._recorder)
        self._stats_line.start()
        gc.freeze()  # these objects stay: a garbage collection that traverses them would delay every stream
        logger.info("engine ready: %s", self._engine.info)

    async def generate(
        self, request: EngineRequest, *, block_hashes: Sequence[int] = (), avoid: Sequence[str] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs of one request: the first token at once, then all tokens since the last output was taken.

        Args:
            request: the prompt and its parameters.
            block_hashes: of the prompt's full blocks. The router that made this call has read them; they are published
                for the routers of the other ingresses.
            avoid: only for the router: replicas that have just failed this request.

        Raises:
            RequestError, OverloadedError, EngineDeadError: as ``AsyncEngine.generate``.
        """
        if block_hashes:
            self._publisher.publish_awaited(block_hashes)
        try:
            async with aclosing(self._engine.generate(request)) as outputs:  # closing it aborts the sequence
                async for output in outputs:
                    yield output
        except (EngineDeadError, OverloadedError) as error:
            error.replica = self._name  # so that the retry can avoid it
            raise

    async def info(self) -> EngineInfo:
        """Return the engine's description: block size, context length, vocabulary and the like."""
        return self._engine.info

    async def metrics(self) -> tuple[str, list[Series]]:
        """Return this replica's name and the current value of every metric."""
        return self._name, self._recorder.snapshot()

    async def live(self) -> tuple[str, EngineSnapshot]:
        """Return this replica's name and its snapshot for the web page."""
        stats, blocks = self._engine.stats(), await self._engine.block_map()
        return self._name, EngineSnapshot.take(stats, self._recorder.snapshot(), blocks)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata that Serve passes to every router once this replica is ready."""
        return {ENDPOINT: self._publisher.endpoint, BLOCK_SIZE: self._engine.info.block_size}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers that the autoscaling policy reads."""
        return replica_pressure(self._engine.load())

    async def check_health(self) -> None:
        """Raise if the engine is dead or stuck in a step; Serve then replaces this replica."""
        self._engine.check_health()

    async def __del__(self) -> None:
        """Shut down. Serve calls this after the last request has ended, and if the constructor has failed."""
        if hasattr(self, "_exporter"):
            self._stats_line.stop()
            self._exporter.stop()
            await self._engine.shutdown()
            self._publisher.close()
