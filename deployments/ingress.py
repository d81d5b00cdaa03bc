"""Ingress: the Serve deployment that speaks HTTP: its lifecycle, its routes, health and metrics.

api/serving.py answers the requests for tokens; nothing here knows how a replica is chosen or what an engine does.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from deployments.api.anthropic.endpoints import MessagesApi
from deployments.api.anthropic.openapi import COUNT_TOKENS, CREATE_MESSAGE
from deployments.api.api_keys import ApiKeys, RequireKey
from deployments.api.body import BodyReader
from deployments.api.descriptions import METRICS, PAGE, PAGE_FILE, STATE
from deployments.api.json_response import JsonResponse
from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.middleware import CountRequests, RecordRequests
from deployments.api.openai.openapi import CHAT, COMPLETIONS, MODEL, MODELS
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.openapi import openapi_document
from deployments.api.responses.endpoints import Responses
from deployments.api.responses.kept_responses import KeptResponses
from deployments.api.responses.openapi import COUNT_INPUT_TOKENS, CREATE, DELETE, INPUT_ITEMS, RETRIEVE
from deployments.api.responses.store import StoredResponse
from deployments.api.routes import Api, ApiRoute, api_route
from deployments.api.serving import Serving
from deployments.api.utilities.invocations import Invocations
from deployments.api.utilities.openapi import DETOKENIZE, INVOCATIONS, LOAD, SERVER_INFO, TOKENIZE
from deployments.api.utilities.server import ServerState
from deployments.api.utilities.tokenization import Tokenization
from deployments.config import AppConfig
from deployments.errors import ApiError
from deployments.observability.ingress_metrics import INGRESS_INFO, REPLICAS_MIN, ingress_recorder
from deployments.observability.prometheus import render
from deployments.observability.ray_exporter import RayExporter
from deployments.observability.recorder import Series
from deployments.request_log.log import RequestLog
from deployments.request_log.record import RequestRecord
from deployments.request_log.tracing import open_tracer
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.engine_client import EngineClient
from deployments.routing.cluster_view import cluster_view
from deployments.routing.recently_routed import RoutedRequest
from deployments.serve.broadcast import all_ingresses, broadcast, first_result
from deployments.serve.http_server import accept_many
from deployments.version import pagoda_version
from deployments.web.live_view import LiveView
from deployments.web.page import WebPage

__all__ = ["Ingress"]

HEALTH_TIMEOUT_S = 1.0
GC_THRESHOLD = 10_000  # objects; at Python's 700 garbage collections take 3% of a busy ingress
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
        self._config = config
        self._keys = ApiKeys.from_environment()
        if needs_key:
            self._keys.require()
        self._engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._view = cluster_view(engines.deployment_name)
        self._log = RequestLog(config.logging)
        self._tracer = open_tracer(config.tracing, config.served_name)
        self._prompts = LazyPromptBuilder(self._engines.info.remote, config.model_path, config.served_name)
        self._dispatcher = Dispatcher(
            self._view,
            self._engines.info.remote,
            max_requests=config.limits.max_concurrent_requests_per_engine,
        )
        client = EngineClient(
            self._dispatcher,
            self._view,
            stall_timeout_s=config.limits.stall_timeout_s,
            request_timeout_s=config.limits.request_timeout_s,
        )
        self._unfinished: set[RequestRecord] = set()
        self._serving = Serving(config, client, self._view, self._prompts, self._log)
        self._kept_responses = KeptResponses(config.limits, _ask_ingresses)
        self._bodies = BodyReader(config.limits.max_body_bytes, config.limits.body_timeout_s)
        self._responses = Responses(self._serving, self._bodies, self._kept_responses)
        self._messages = MessagesApi(self._serving, self._bodies, strip_billing_header=config.strip_billing_header)
        ingress_recorder().set(INGRESS_INFO, 1, model=config.served_name)
        ingress_recorder().set(REPLICAS_MIN, config.min_engine_replicas)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this after the constructor."""
        record = Middleware(RecordRequests, on_start=self._unfinished.add, on_end=self._finish)
        middleware = [record, Middleware(CountRequests)]
        if self._keys:
            middleware.append(Middleware(RequireKey, keys=self._keys, prompts_browser=self._config.web))
        return Api([api_route(route) for route in self.routes], middleware, self._lifespan)

    @cached_property
    def routes(self) -> list[ApiRoute]:
        """Every endpoint."""
        routes = [
            ApiRoute("/v1/chat/completions", "POST", self.chat, CHAT),
            ApiRoute("/v1/completions", "POST", self.completions, COMPLETIONS),
            ApiRoute("/v1/responses", "POST", self._responses.create, CREATE),
            ApiRoute("/v1/responses/input_tokens", "POST", self._responses.count_tokens, COUNT_INPUT_TOKENS),
            ApiRoute("/v1/responses/{response_id}", "GET", self._responses.retrieve, RETRIEVE),
            ApiRoute("/v1/responses/{response_id}", "DELETE", self._responses.delete, DELETE),
            ApiRoute("/v1/responses/{response_id}/input_items", "GET", self._responses.input_items, INPUT_ITEMS),
            ApiRoute("/v1/messages", "POST", self._messages.create, CREATE_MESSAGE),
            ApiRoute("/v1/messages/count_tokens", "POST", self._messages.count_tokens, COUNT_TOKENS),
            ApiRoute("/v1/models", "GET", self._serving.models, MODELS),
            ApiRoute("/v1/models/{name:path}", "GET", self._serving.model, MODEL),
            *self._utilities(),
            ApiRoute("/health", "GET", self.health, STATE),
            ApiRoute("/ping", "GET", self.health, STATE),
            ApiRoute("/metrics", "GET", self.metrics, METRICS),
            ApiRoute("/version", "GET", self.version, STATE),
            ApiRoute("/openapi.json", "GET", self.openapi, STATE),
        ]
        if self._config.web:
            page = WebPage(self._live_view())
            routes += [
                ApiRoute("/", "GET", page.index, PAGE),
                ApiRoute("/web/{name}", "GET", page.file, PAGE_FILE),
                ApiRoute("/live", "GET", page.live, STATE),
            ]
        return routes

    def _utilities(self) -> list[ApiRoute]:
        tokenization = Tokenization(self._serving, self._bodies)
        state = ServerState(self._config, self._prompts.get, lambda: broadcast(all_ingresses(), "num_unfinished"))
        return [
            ApiRoute("/invocations", "POST", Invocations(self._serving, self._bodies).invoke, INVOCATIONS),
            ApiRoute("/tokenize", "POST", tokenization.tokenize, TOKENIZE),
            ApiRoute("/detokenize", "POST", tokenization.detokenize, DETOKENIZE),
            ApiRoute("/load", "GET", state.load, LOAD),
            ApiRoute("/server_info", "GET", state.server_info, SERVER_INFO),
        ]

    def _live_view(self) -> LiveView:
        engines = partial(broadcast, self._engines, "live")
        return LiveView(self._config.served_name, engines, lambda: broadcast(all_ingresses(), "recently_routed"))

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
        yield
        self._dispatcher.close()
        await asyncio.to_thread(self._tracer.close)

    def _finish(self, record: RequestRecord) -> None:
        """Write the log line and the spans of a request that has ended."""
        self._unfinished.discard(record)
        self._log.write(record, self._tracer.export(record))

    # --- requests for tokens --------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._serving.chat(await self._bodies.read(ChatRequest, request))

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        return await self._serving.completions(await self._bodies.read(CompletionRequest, request))

    # --- health and metrics ---------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """Return 200 if a request would be served now, else 503."""
        if self._config.autoscaling.starts_from_zero and not self._view.replicas:
            return JsonResponse({"status": "idle"})  # the first request starts an engine
        await self._prompts.get()
        if not self._view.replicas and not await self._an_engine_answers():
            raise ApiError(503, "no engine replica is ready", code="no_replica", retry_after_s=5)
        return JsonResponse({"status": "ok"})

    async def _an_engine_answers(self) -> bool:
        """Whether an engine answers a call. With another request router than ours no replica is in the view."""
        call = self._engines.info.remote()
        try:
            await asyncio.wait_for(call, HEALTH_TIMEOUT_S)
        except Exception:  # of any kind: no request can be served
            call.cancel()  # type: ignore[no-untyped-call]
            return False
        return True

    async def version(self) -> Response:
        """Return Pagoda's version."""
        return JsonResponse({"version": pagoda_version()})

    async def openapi(self) -> Response:
        """Return the OpenAPI document of this server."""
        return JsonResponse(self._openapi)

    @cached_property
    def _openapi(self) -> dict[str, Any]:
        return openapi_document(self.routes, version=pagoda_version(), needs_key=bool(self._keys))

    async def metrics(self) -> Response:
        """Return the metrics of all engine replicas and ingresses, read now."""
        engines, ingresses = await asyncio.gather(
            broadcast(self._engines, "metrics"), broadcast(all_ingresses(), "ingress_metrics")
        )
        return PlainTextResponse(render(engines, ingresses), media_type=CONTENT_TYPE_LATEST)

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
        return _name(), self._kept_responses.store.get(response_id)

    async def stored_items(self, ids: list[str]) -> tuple[str, dict[str, dict[str, Any]] | None]:
        """Return this ingress's name and the output items with these ids that it keeps, or None."""
        return _name(), await asyncio.to_thread(self._kept_responses.store.items, ids) or None

    async def delete_response(self, response_id: str) -> tuple[str, bool | None]:
        """Drop a response that this ingress keeps; returns its name and True, or None if it keeps none."""
        return _name(), self._kept_responses.store.delete(response_id) or None


async def _ask_ingresses(method: str, argument: Any) -> Any:
    return await first_result(all_ingresses(), method, argument)


def _name() -> str:
    return serve.get_replica_context().replica_id.unique_id
