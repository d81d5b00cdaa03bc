"""Responses of the Messages API, checked strictly against the types of Anthropic's client and added up as it does."""

from __future__ import annotations

import json
from typing import Any

from anthropic import NOT_GIVEN, MessageStream
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def _require_known(value: object) -> None:
    """Fail for a field that the client's type does not have."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, value
        for name in value.model_fields_set:
            _require_known(getattr(value, name))
    for item in value if isinstance(value, list) else ():
        _require_known(item)


def checked_message(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a whole response."""
    _require_known(Message.model_validate(body, strict=True))
    assert body["content"] == [block for block in body["content"] if block.get("text") != ""]
    return body


def checked_error(body: dict[str, Any]) -> dict[str, Any]:
    """Return the ``error`` of an error's body."""
    if body["error"]["type"] != "request_too_large":  # documented, but no type of the client
        _require_known(ErrorResponse.model_validate(body, strict=True))
    assert 0 < len(body["error"]["message"]) <= 400
    error: dict[str, Any] = body["error"]
    return error


def checked_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, in the order that the API prescribes; a ping is left out."""
    events: list[dict[str, Any]] = []
    assert text.endswith("\n\n")
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue  # a comment, which a pause of a second brings
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert events.pop(1) == {"type": "ping"}
    for event in events:
        if event["type"] == "error":
            checked_error(event)
        else:
            _require_known(_EVENT.validate_python(event, strict=True))
    _check_order([event for event in events if event["type"] != "error"], failed=events[-1]["type"] == "error")
    return events


def _check_order(events: list[dict[str, Any]], *, failed: bool) -> None:
    assert events[0]["type"] == "message_start"
    assert failed or [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    is_open, index = False, -1
    for event in events[1 : None if failed else -2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            is_open, index = True, index + 1
        else:
            assert is_open
            is_open = kind != "content_block_stop"
            assert kind in ("content_block_delta", "content_block_stop")
        assert event["index"] == index
    assert failed or not is_open


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events add up to."""
    raw: Any = _RawStream(_EVENT.validate_python(event) for event in events)
    message = MessageStream(raw, NOT_GIVEN).get_final_message()
    return message.model_dump(exclude_unset=True, exclude={"stop_details"})


class _RawStream(list[Any]):
    """The events of a stream, in the place of a connection."""


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what differs between two requests."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in body["content"]]
    return {name: value for name, value in body.items() if name != "id"} | {"content": content}
