"""The endpoints of the Messages API."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.anthropic.attribution import without_billing_header
from deployments.api.anthropic.openapi import COUNT_TOKENS, CREATE_MESSAGE
from deployments.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from deployments.api.anthropic.response_writers import MessagesWriters
from deployments.api.body import MAX_INLINE_BYTES, BodyReader
from deployments.api.json_response import JsonResponse
from deployments.api.openai.protocol import ChatRequest
from deployments.api.routes import ApiRoute
from deployments.api.serving import Serving

__all__ = ["MessagesApi"]


class MessagesApi:
    """Answers requests of Anthropic's clients.

    Args:
        serving: answers the chat requests that they stand for.
        bodies: reads them.
        strip_billing_header: whether Claude Code's billing header is kept out of prompts.
    """

    def __init__(self, serving: Serving, bodies: BodyReader, *, strip_billing_header: bool) -> None:
        self._serving = serving
        self._bodies = bodies
        self._strip_billing_header = strip_billing_header

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/messages", "POST", self.create, CREATE_MESSAGE),
            ApiRoute("/v1/messages/count_tokens", "POST", self.count_tokens, COUNT_TOKENS),
        ]

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._bodies.read(MessagesRequest, request)
        return await self._serving.chat(await self._chat(body), MessagesWriters)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation's prompt, which may be longer than the context."""
        body = await self._bodies.read(CountTokensRequest, request)
        builder = await self._serving.builder_for(body.model)
        return JsonResponse({"input_tokens": len(await builder.chat_token_ids(await self._chat(body)))})

    async def _chat(self, body: CountTokensRequest) -> ChatRequest:
        if not self._strip_billing_header:
            return body.chat
        if body.chat.num_bytes <= MAX_INLINE_BYTES:
            return without_billing_header(body.chat)
        return await asyncio.to_thread(without_billing_header, body.chat)
