"""POST /tokenize and POST /detokenize, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import BodyReader, JsonBody
from deployments.api.json_response import JsonResponse
from deployments.api.openai.messages import Conversation
from deployments.api.serving import Serving
from engine.text.tokenizer import Tokenizer

__all__ = [
    "DetokenizeRequest",
    "DetokenizeResponse",
    "Tokenization",
    "TokenizeChatRequest",
    "TokenizeRequest",
    "TokenizeResponse",
]


class TokenizeRequest(JsonBody):
    """Body of POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(Conversation):
    """Body of POST /tokenize with a conversation, which is rendered as a chat request's is."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(JsonBody):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Any] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})


class TokenizeResponse(BaseModel):
    """The tokens of a text or a conversation."""

    model_config = ConfigDict(extra="forbid")
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    model_config = ConfigDict(extra="forbid")
    prompt: str


class Tokenization:
    """The endpoints of one ingress.

    Args:
        serving: knows the model's name and its tokenizer.
        bodies: reads them.
    """

    def __init__(self, serving: Serving, bodies: BodyReader) -> None:
        self._serving = serving
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation as the model would get it."""
        kinds: Mapping[str, type[TokenizeRequest | TokenizeChatRequest]]
        kinds = {"prompt": TokenizeRequest, "messages": TokenizeChatRequest}
        body = await self._bodies.read_by_field(kinds, request)
        builder = await self._serving.builder_for(body.model)
        if isinstance(body, TokenizeRequest):
            token_ids = await builder.text_token_ids(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            token_ids = await builder.chat_token_ids(body)

        def respond(tokenizer: Tokenizer) -> Response:
            names = tokenizer.token_names(token_ids) if body.return_token_strs else None
            counts = {"count": len(token_ids), "max_model_len": builder.max_total_tokens}
            return JsonResponse({**counts, "tokens": token_ids, "token_strs": names})

        response: Response = await builder.run_with_tokenizer(respond, cost=len(token_ids))
        return response

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        body = await self._bodies.read(DetokenizeRequest, request)
        builder = await self._serving.builder_for(body.model)
        return JsonResponse({"prompt": await builder.text_of(body.tokens, "tokens")})
