"""What the OpenAPI document says about /v1/responses."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from deployments.api.descriptions import ACCEPTS_BODY, GENERATES, Description, Query, ServerSentEvents
from deployments.api.responses.protocol import ResponseRequest

__all__ = ["CANCEL", "COUNT_INPUT_TOKENS", "CREATE", "DELETE", "INPUT_ITEMS", "RETRIEVE"]

_TAG = "OpenAI responses"
_NOT_FOUND = frozenset({404})


class ResponseEvent(BaseModel):
    """An event of a streamed response; its other fields depend on its type, as in the OpenAI API."""

    model_config = ConfigDict(extra="allow")
    type: str
    sequence_number: int


class ResponseObject(BaseModel):
    """A response, with the fields of the OpenAI API."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class DeletedResponse(BaseModel):
    """The answer to a deletion."""

    model_config = ConfigDict(extra="forbid")
    id: str
    object: Literal["response"]
    deleted: bool


class CountedInputTokens(BaseModel):
    """The number of tokens of an input."""

    model_config = ConfigDict(extra="forbid")
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(BaseModel):
    """A page of input items."""

    model_config = ConfigDict(extra="allow")
    object: Literal["list"]


_EVENTS = ServerSentEvents((ResponseEvent,), ends_with_done=False)
_PAGE = (
    Query("order", {"enum": ["asc", "desc"]}),
    Query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
    Query("after", {"type": "string"}),
)

CREATE = Description(_TAG, (ResponseRequest,), (ResponseObject,), _EVENTS, GENERATES)
RETRIEVE = Description(
    _TAG,
    responses=(ResponseObject,),
    stream=_EVENTS,
    statuses=_NOT_FOUND | {400},
    query=(Query("stream", {"type": "boolean"}), Query("starting_after", {"type": "integer", "minimum": 0})),
)
CANCEL = Description(_TAG, responses=(ResponseObject,), statuses=_NOT_FOUND | {400})
DELETE = Description(_TAG, responses=(DeletedResponse,), statuses=_NOT_FOUND)
INPUT_ITEMS = Description(_TAG, responses=(ItemList,), statuses=_NOT_FOUND | {400}, query=_PAGE)
COUNT_INPUT_TOKENS = Description(_TAG, (ResponseRequest,), (CountedInputTokens,), statuses=ACCEPTS_BODY | {501})
