"""The bodies of POST /tokenize and POST /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from deployments.api.body import JsonBody
from deployments.api.openai.messages import Conversation

__all__ = ["DetokenizeRequest", "TokenizeChatRequest", "TokenizeRequest"]


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
