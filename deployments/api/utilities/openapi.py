"""What the OpenAPI document says about the endpoints around generation and about the server itself."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.api.descriptions import ACCEPTS_BODY, GENERATES, Description, ServerSentEvents
from deployments.api.openai.openapi import CHAT, COMPLETIONS
from deployments.api.utilities.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest

__all__ = ["DETOKENIZE", "INVOCATIONS", "LOAD", "METRICS", "SERVER_INFO", "STATE", "TOKENIZE"]

_TAG = "utilities"


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


TOKENIZE = Description(_TAG, (TokenizeRequest, TokenizeChatRequest), (TokenizeResponse,), statuses=ACCEPTS_BODY | {501})
DETOKENIZE = Description(_TAG, (DetokenizeRequest,), (DetokenizeResponse,), statuses=ACCEPTS_BODY)
LOAD = Description(_TAG, responses=(LoadResponse,))
SERVER_INFO = Description(_TAG, responses=(ServerInfoResponse,))
STATE = Description("server")
METRICS = Description("server", media_type="text/plain")

assert CHAT.stream is not None
assert COMPLETIONS.stream is not None
INVOCATIONS = Description(
    _TAG,
    (*CHAT.bodies, *COMPLETIONS.bodies),
    (*CHAT.responses, *COMPLETIONS.responses),
    ServerSentEvents((*CHAT.stream.events, *COMPLETIONS.stream.events)),
    GENERATES,
)
