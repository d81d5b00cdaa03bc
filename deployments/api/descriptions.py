"""What an endpoint takes and returns, declared beside its route, for the OpenAPI document.

It knows pydantic's types and HTTP status codes, but no API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = [
    "ACCEPTS_BODY",
    "GENERATES",
    "Description",
    "ErrorResponse",
    "Query",
    "ServerSentEvents",
]

ACCEPTS_BODY = frozenset({400, 404, 413, 503})  # of one that reads a body for a model
GENERATES = ACCEPTS_BODY | {408, 501}  # of one that generates tokens for it


class Error(BaseModel):
    """Why a request failed, as the OpenAI API says it."""

    model_config = ConfigDict(extra="forbid")
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response with an error status."""

    model_config = ConfigDict(extra="forbid")
    error: Error


@dataclass(frozen=True)
class ServerSentEvents:
    """A stream of events.

    Attributes:
        events: the types of the JSON in ``data``.
        ends_with_done: whether the last event is ``data: [DONE]``.
    """

    events: tuple[type[BaseModel], ...]
    ends_with_done: bool = True


@dataclass(frozen=True)
class Query:
    """A parameter of the query, and its JSON schema."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Description:
    """One endpoint.

    Attributes:
        tag: the API that it belongs to.
        bodies: the types that the request's body may have; empty without a body.
        responses: the types that the JSON of a response with status 200 may have; empty for any object.
        stream: the response to a body with ``stream: true``, if that is offered.
        statuses: of the error responses, without those that every endpoint may return.
        error: the type of the body of error responses.
        query: the query's parameters.
        media_type: of the response, if it is not JSON.
        form: the JSON schema of a body of the type multipart/form-data, if it is one.
    """

    tag: str
    bodies: tuple[type[BaseModel], ...] = ()
    responses: tuple[type[BaseModel], ...] = ()
    stream: ServerSentEvents | None = None
    statuses: frozenset[int] = frozenset()
    error: type[BaseModel] = ErrorResponse
    media_type: str | None = None
    form: Mapping[str, Any] | None = None
    query: tuple[Query, ...] = ()
