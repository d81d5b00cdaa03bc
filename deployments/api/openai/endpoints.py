"""OpenAiApi and Models: the endpoints of chat, completions and models."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import BodyReader
from deployments.api.json_response import JsonResponse
from deployments.api.openai.openapi import CHAT, COMPLETIONS, MODEL, MODELS
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.routes import ApiRoute
from deployments.api.serving import Serving

__all__ = ["Models", "OpenAiApi"]


class OpenAiApi:
    """Answers conversations and continues prompts.

    Args:
        serving: answers the requests.
        bodies: reads them.
    """

    def __init__(self, serving: Serving, bodies: BodyReader) -> None:
        self._serving = serving
        self._bodies = bodies

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/chat/completions", "POST", self.chat, CHAT),
            ApiRoute("/v1/completions", "POST", self.completions, COMPLETIONS),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._serving.chat(await self._bodies.read(ChatRequest, request))

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        return await self._serving.completions(await self._bodies.read(CompletionRequest, request))


class Models:
    """Lists and describes the served model.

    Args:
        serving: knows which model that is.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._started = int(time.time())

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/models", "GET", self.models, MODELS),
            ApiRoute("/v1/models/{name:path}", "GET", self.model, MODEL),
        ]

    async def models(self) -> Response:
        """List the served models."""
        return JsonResponse({"object": "list", "data": [await self._card(None)]})

    async def model(self, name: str) -> Response:
        """Describe one served model."""
        return JsonResponse(await self._card(name))

    async def _card(self, name: str | None) -> dict[str, Any]:
        builder = await self._serving.builder_for(name)
        return {
            "id": self._serving.model,
            "object": "model",
            "created": self._started,
            "owned_by": "pagoda",
            "max_model_len": builder.max_total_tokens,
            "task": self._serving.task,
        }
