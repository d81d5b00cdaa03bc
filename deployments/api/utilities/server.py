"""The endpoints about the server itself: how busy it is, how it is configured, whether it is healthy, its metrics."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Protocol

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from deployments.api.json_response import JsonResponse
from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.openapi import openapi_document
from deployments.api.routes import ApiRoute
from deployments.api.utilities.openapi import LOAD, METRICS, SERVER_INFO, STATE
from deployments.config import AppConfig
from deployments.errors import ApiError
from deployments.observability.prometheus import render
from deployments.observability.recorder import Series
from deployments.proxy.paths import HEALTH_PATHS
from deployments.routing.cluster_view import ClusterView
from deployments.version import pagoda_version

__all__ = ["Replicas", "ServerState"]

_ADDRESSES = frozenset({"otlp_endpoint"})  # whether one is set may be known, the value may not


class Replicas(Protocol):
    """Calls to all replicas of the application. Each result is that of those that answer in time, by their names."""

    async def engine_answers(self) -> bool:
        """Whether an engine answers a call."""

    async def num_unfinished(self) -> Mapping[str, int]:
        """Return the number of unfinished requests for tokens of each ingress."""

    async def metrics(self) -> tuple[Mapping[str, Sequence[Series]], Mapping[str, Sequence[Series]]]:
        """Return the metrics of each engine and of each ingress."""

    async def ask_ingresses(self, method: str, argument: Any) -> Any:
        """Return the first result of a method of all ingresses that is not None."""


class ServerState:
    """The endpoints of one ingress.

    Args:
        config: the application's configuration.
        prompts: knows the engines' description.
        view: the engines that the router knows.
        replicas: calls all replicas.
        routes: returns every endpoint of the server, for the OpenAPI document.
        needs_key: whether API keys are set.
    """

    def __init__(
        self,
        config: AppConfig,
        prompts: LazyPromptBuilder,
        view: ClusterView,
        replicas: Replicas,
        routes: Callable[[], Sequence[ApiRoute]],
        *,
        needs_key: bool,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._view = view
        self._replicas = replicas
        self._routes = routes
        self._needs_key = needs_key

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/load", "GET", self.load, LOAD),
            ApiRoute("/server_info", "GET", self.server_info, SERVER_INFO),
            *(ApiRoute(path, "GET", self.health, STATE, needs_key=False) for path in HEALTH_PATHS),
            ApiRoute("/metrics", "GET", self.metrics, METRICS),
            ApiRoute("/version", "GET", self.version, STATE, needs_key=False),
            ApiRoute("/openapi.json", "GET", self.openapi, STATE),
        ]

    async def load(self) -> Response:
        """Return the number of unfinished requests for tokens, at all ingresses together."""
        return JsonResponse({"server_load": sum((await self._replicas.num_unfinished()).values())})

    async def server_info(self) -> Response:
        """Return the configuration, without keys, paths and addresses."""
        info = asdict((await self._prompts.get()).info)
        return JsonResponse(
            {
                "version": pagoda_version(),
                "python": platform.python_version(),
                "model": self._config.served_name,
                "config": self._public_config(),
                "engine": {name: value for name, value in info.items() if name != "model"},
            }
        )

    async def health(self) -> Response:
        """Return 200 if a request would be served now, else 503."""
        if self._config.autoscaling.starts_from_zero and not self._view.replicas:
            return JsonResponse({"status": "idle"})  # the first request starts an engine
        await self._prompts.get()
        # With another request router than ours no replica is in the view.
        if not self._view.replicas and not await self._replicas.engine_answers():
            raise ApiError(503, "no engine replica is ready", code="no_replica", retry_after_s=5)
        return JsonResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Return the metrics of all engine replicas and ingresses, read now."""
        return PlainTextResponse(render(*await self._replicas.metrics()), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        """Return Pagoda's version."""
        return JsonResponse({"version": pagoda_version()})

    async def openapi(self) -> Response:
        """Return the OpenAPI document of this server."""
        return JsonResponse(self._document)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return openapi_document(self._routes(), version=pagoda_version(), needs_key=self._needs_key)

    def _public_config(self) -> dict[str, Any]:
        """Return the configuration, defaults included, without what only the operator may see."""
        engine = asdict(self._config.engine_config)
        public: dict[str, Any] = _without_private(self._config.model_dump(mode="json") | {"engine": engine})
        del public["engine"]["model"]
        return public | {"model": self._config.model_path.name, "model_name": self._config.model_name}


def _without_private(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: "<address>" if name in _ADDRESSES and inner is not None else _without_private(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_private(inner) for inner in value]
    return "<path>" if isinstance(value, str) and ("/" in value or "\\" in value) else value
