"""Ingress: the Serve deployment that speaks HTTP: its lifecycle, and the calls of other ingresses.

api/endpoints.py lists the endpoints, and api/serving.py answers the requests for tokens. Nothing here knows how a
replica is chosen or what an engine does.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import ASGIApp

from deployments.api.api_keys import ApiKeys
from deployments.api.application import Application
from deployments.api.batches.lines import line_call
from deployments.api.endpoints import Endpoints
from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.pooling.serving import PoolingServing
from deployments.api.responses.store import StoredResponse
from deployments.api.serving import Serving
from deployments.batch.service import BatchService
from deployments.config import AppConfig
from deployments.observability.ingress_metrics import INGRESS_INFO, REPLICAS_MIN, ingress_recorder
from deployments.observability.ray_exporter import RayExporter
from deployments.observability.recorder import Series
from deployments.request_log.log import RequestLog
from deployments.request_log.record import RequestRecord
from deployments.request_log.tracing import open_tracer
from deployments.requests.dispatcher import Dispatcher
from deployments.routing.cluster_view import cluster_view
from deployments.routing.recently_routed import RoutedRequest
from deployments.serve.http_server import accept_many
from deployments.serve.replicas import Replicas
from deployments.web.page import WebPage

__all__ = ["Ingress"]

GC_THRESHOLD = 10_000  # objects; at Python's 700 garbage collections take 3% of a busy ingress
MAX_LINES = 2048  # of batches, sent or held at once
LOADING_TIMEOUT_S = 60.0  # for the engines, before Serve sends requests to a new ingress; afterwards they get a 503


class Ingress:
    """The user class of the ingress deployment.

    Args:
        engines: the handle to the engine deployment.
        config: the application's configuration.
        needs_key: API keys were set where the application was built, so this node must have them too.
    """

    def __init__(self, engines: DeploymentHandle[Any], config: AppConfig, *, needs_key: bool = False) -> None:
        accept_many()  # Serve starts the HTTP server after this constructor
        os.environ["grpc_proxy"] = ""  # noqa: SIM112 - and its calls to engines, which no proxy reaches, after it
        self._keys = ApiKeys.from_environment()
        if needs_key:
            self._keys.require()
        # Some slots of an engine's batch, and of its queue, are left for requests that come while a batch runs.
        self._max_background = max(
            1, min(3 * config.engine_config.max_num_seqs // 4, config.limits.max_concurrent_requests_per_engine // 2)
        )
        engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._view = cluster_view(engines.deployment_name)
        self._log = RequestLog(config.logging)
        self._tracer = open_tracer(config.tracing, config.served_name)
        self._prompts = LazyPromptBuilder(
            engines.info.remote, config.model_path, config.served_name, config.load_tokenizer
        )
        self._dispatcher = Dispatcher(
            self._view,
            engines.info.remote,
            max_requests=config.limits.max_concurrent_requests_per_engine,
            stall_timeout_s=config.limits.stall_timeout_s,
            request_timeout_s=config.limits.request_timeout_s,
            max_background=self._max_background,
            max_background_slowdown=config.batches.max_slowdown,
            kv_replication=config.router.kv_replication,
        )
        self._unfinished: set[RequestRecord] = set()
        self._replicas = replicas = Replicas(engines)
        self._batches = None if (options := config.batch_options) is None else BatchService(options)
        self.endpoints = Endpoints(
            config,
            Serving(config, self._dispatcher, self._prompts, self._log),
            PoolingServing(config, self._dispatcher, self._prompts, self._log),
            self._prompts,
            self._view,
            replicas,
            batches=self._batches,
            page=WebPage(config.served_name, replicas).routes() if config.has_page else (),
            needs_key=bool(self._keys),
        )
        ingress_recorder().set(INGRESS_INFO, 1, model=config.served_name)
        ingress_recorder().set(REPLICAS_MIN, config.min_engine_replicas)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this after the constructor."""
        start, finish = self._unfinished.add, self._finish
        return Application(self.endpoints.routes, self._keys, self._lifespan, on_start=start, on_end=finish)

    @asynccontextmanager
    async def _lifespan(self, api: Starlette) -> AsyncIterator[None]:
        """Load what requests need before Serve sends any: this ingress may be new among busy engines."""
        # Metrics first: they must also show an application whose engines never start.
        RayExporter(ingress_recorder(), label="ingress", refresh=self._view.report_state).start()
        self._dispatcher.start()
        await self._prompts.wait(LOADING_TIMEOUT_S)
        gc.collect()
        gc.freeze()  # these objects stay: a collection that traverses them delays every stream, by 0.1 s and more
        gc.set_threshold(GC_THRESHOLD)
        if self._batches is not None:
            self._start_batches(self._batches)
        yield
        if self._batches is not None:
            await self._batches.close()
        self._dispatcher.close()
        await asyncio.to_thread(self._tracer.close)

    def _start_batches(self, batches: BatchService) -> None:
        # A few more than run, so that the next ones are tokenised when there is room.
        batches.start(
            line_call(self.endpoints.routes, self._finish),
            lambda: min(MAX_LINES, 8 + max(1, len(self._view.replicas)) * self._max_background * 5 // 4),
            self._observe_other_ingresses,
        )

    async def _observe_other_ingresses(self) -> None:
        """Tell the gate of batches how many requests the other ingresses have."""
        unfinished = await self._replicas.num_unfinished()
        own = _name()
        self._dispatcher.background.num_elsewhere = sum(num for name, num in unfinished.items() if name != own)

    def _finish(self, record: RequestRecord) -> None:
        """Write the log line and the spans of a request that has ended."""
        self._unfinished.discard(record)
        self._log.write(record, self._tracer.export(record))

    # --- called by other ingresses ----------------------------------------------------------------------------------

    async def ingress_metrics(self) -> tuple[str, list[Series]]:
        """Return this ingress's name and the present value of every metric."""
        self._view.report_state()
        return _name(), ingress_recorder().snapshot()

    async def num_unfinished(self) -> tuple[str, int]:
        """Return this ingress's name and the number of its unfinished requests for tokens."""
        return _name(), len(self._unfinished)

    async def recently_routed(self) -> tuple[str, list[RoutedRequest]]:
        """Return this ingress's name and where it has sent its last requests."""
        return _name(), self._view.recently_routed()

    async def stored_response(self, response_id: str) -> tuple[str, StoredResponse | None]:
        """Return this ingress's name and a response that it keeps, or None."""
        return _name(), self.endpoints.responses.kept.find(response_id)

    async def stored_items(self, ids: list[str]) -> tuple[str, dict[str, dict[str, Any]] | None]:
        """Return this ingress's name and the output items with these ids that it keeps, or None."""
        return _name(), await asyncio.to_thread(self.endpoints.responses.kept.store.items, ids) or None

    async def events_after(self, events: tuple[str, int]) -> tuple[str, tuple[list[bytes], bool] | None]:
        """Return this ingress's name and events of a response that it keeps, or None; see `EventLog.events_after`."""
        return _name(), await self.endpoints.responses.kept.events_after(*events)

    async def delete_response(self, response_id: str) -> tuple[str, bool | None]:
        """Drop a response that this ingress keeps; returns its name and True, or None if it keeps none."""
        return _name(), self.endpoints.responses.kept.delete_own(response_id) or None

    async def cancel_response(self, response_id: str) -> tuple[str, StoredResponse | None]:
        """End a response that this ingress computes; returns its name and the response, or None if it keeps none."""
        return _name(), self.endpoints.responses.kept.cancel_own(response_id)


def _name() -> str:
    return serve.get_replica_context().replica_id.unique_id
