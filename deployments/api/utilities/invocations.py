"""POST /invocations: the one endpoint that Amazon SageMaker calls, for chat and completion bodies alike."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import BodyReader
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.routes import ApiRoute
from deployments.api.serving import Serving
from deployments.api.utilities.openapi import INVOCATIONS

__all__ = ["Invocations"]


class Invocations:
    """The endpoint of one ingress.

    Args:
        serving: answers the requests.
        bodies: reads them.
    """

    def __init__(self, serving: Serving, bodies: BodyReader) -> None:
        self._serving = serving
        self._bodies = bodies

    def routes(self) -> list[ApiRoute]:
        """Return the endpoint."""
        return [ApiRoute("/invocations", "POST", self.invoke, INVOCATIONS)]

    async def invoke(self, request: Request) -> Response:
        """Answer a conversation if the body has messages, else continue its prompt."""
        kinds: Mapping[str, type[ChatRequest | CompletionRequest]]
        kinds = {"messages": ChatRequest, "prompt": CompletionRequest}
        body = await self._bodies.read_by_field(kinds, request)
        if isinstance(body, ChatRequest):
            return await self._serving.chat(body)
        return await self._serving.completions(body)
