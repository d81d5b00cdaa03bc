"""What the OpenAPI document says about /v1/messages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from deployments.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from deployments.api.descriptions import ACCEPTS_BODY, GENERATES, Description, ServerSentEvents

__all__ = ["COUNT_TOKENS", "CREATE_MESSAGE"]

_TAG = "Anthropic messages"


class MessagesErrorDetail(BaseModel):
    """Why a request failed, as the Messages API says it."""

    model_config = ConfigDict(extra="forbid")
    type: str
    message: str


class MessagesError(BaseModel):
    """The body of a response with an error status."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessageObject(BaseModel):
    """A message, with the fields of the Messages API."""

    model_config = ConfigDict(extra="allow")
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None


class MessageEvent(BaseModel):
    """An event of a streamed message; its other fields depend on its type, as in the Messages API."""

    model_config = ConfigDict(extra="allow")
    type: str


class CountedTokens(BaseModel):
    """The number of tokens of a prompt."""

    model_config = ConfigDict(extra="forbid")
    input_tokens: int


CREATE_MESSAGE = Description(
    _TAG,
    (MessagesRequest,),
    (MessageObject,),
    ServerSentEvents((MessageEvent,), ends_with_done=False),
    GENERATES,
    error=MessagesError,
)
COUNT_TOKENS = Description(
    _TAG, (CountTokensRequest,), (CountedTokens,), statuses=ACCEPTS_BODY | {501}, error=MessagesError
)
