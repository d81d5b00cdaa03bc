"""GET /load and GET /server_info: how busy the server is, and how it is configured."""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from deployments.api.json_response import JsonResponse
from deployments.api.prompts import PromptBuilder
from deployments.config import AppConfig
from deployments.version import pagoda_version

__all__ = ["LoadResponse", "ServerInfoResponse", "ServerState"]

_ADDRESSES = frozenset({"otlp_endpoint"})  # whether one is set may be known, the value may not


class LoadResponse(BaseModel):
    """The load in vLLM's shape."""

    model_config = ConfigDict(extra="forbid")
    server_load: int


class ServerInfoResponse(BaseModel):
    """The server's software and configuration."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    version: str
    python: str
    model: str
    config: dict[str, Any]
    engine: dict[str, Any]


class ServerState:
    """The endpoints of one ingress.

    Args:
        config: the application's configuration.
        builder: returns what knows the engines' description.
        num_unfinished: returns the unfinished requests for tokens of each ingress.
    """

    def __init__(
        self,
        config: AppConfig,
        builder: Callable[[], Awaitable[PromptBuilder]],
        num_unfinished: Callable[[], Awaitable[Mapping[str, int]]],
    ) -> None:
        self._config = config
        self._builder = builder
        self._num_unfinished = num_unfinished

    async def load(self) -> Response:
        """Return the number of unfinished requests for tokens, at all ingresses together."""
        return JsonResponse({"server_load": sum((await self._num_unfinished()).values())})

    async def server_info(self) -> Response:
        """Return the configuration, without keys, paths and addresses."""
        info = asdict((await self._builder()).info)
        return JsonResponse(
            {
                "version": pagoda_version(),
                "python": platform.python_version(),
                "model": self._config.served_name,
                "config": self._public_config(),
                "engine": {name: value for name, value in info.items() if name != "model"},
            }
        )

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
