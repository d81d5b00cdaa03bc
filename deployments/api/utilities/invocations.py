"""POST /invocations: the one endpoint that Amazon SageMaker calls, for chat and completion bodies alike."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import read_body_by_field
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.serving import Serving

__all__ = ["Invocations"]


class Invocations:
    """The endpoint of one ingress.

    Args:
        serving: answers the requests.
        max_body_bytes: a longer body is rejected.
    """

    def __init__(self, serving: Serving, max_body_bytes: int) -> None:
        self._serving = serving
        self._max_body_bytes = max_body_bytes

    async def invoke(self, request: Request) -> Response:
        """Answer a conversation if the body has messages, else continue its prompt."""
        kinds: Mapping[str, type[ChatRequest | CompletionRequest]]
        kinds = {"messages": ChatRequest, "prompt": CompletionRequest}
        body = await read_body_by_field(kinds, request, self._max_body_bytes)
        if isinstance(body, ChatRequest):
            return await self._serving.chat(body)
        return await self._serving.completions(body)
