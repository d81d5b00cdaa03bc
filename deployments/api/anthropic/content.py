"""The content of a response: the events of a parser become content blocks, whole or as a stream's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from json.encoder import encode_basestring
from typing import Any

from pydantic import TypeAdapter

from deployments.api.json_response import encode_json
from deployments.parsers.call_ids import NewId
from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning

__all__ = ["BlockEvents", "content_blocks", "encode_event"]

_OBJECT = TypeAdapter(dict[str, Any])
SIGNATURE = "unsigned"  # of thinking; nothing checks it, but clients expect one
_TEXT_DELTAS = {
    Content: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    CallArguments: ("input_json_delta", "partial_json"),
}


def content_blocks(events: Iterable[Event], new_id: NewId) -> list[dict[str, Any]]:
    """Return the content of a whole response."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if _opens_block(event, blocks[-1]["type"] if blocks else None):
            blocks.append(_empty_block(event, new_id))
            if isinstance(event, Content) and len(blocks) > 1:
                event = Content(event.text.lstrip())  # it separates the blocks
        if isinstance(event, CallArguments):
            blocks[-1]["input"] += event.text
        elif not isinstance(event, CallStart):
            blocks[-1][_TEXT_DELTAS[type(event)][1]] += event.text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _input(block["input"])
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
    return blocks


def _opens_block(event: Event, current: str | None) -> bool:
    """Whether an event belongs to another block than the one of type ``current``."""
    if isinstance(event, CallArguments):
        return False
    return isinstance(event, CallStart) or _type_of(event) != current


def _type_of(event: Event) -> str:
    if isinstance(event, Content):
        return "text"
    return "thinking" if isinstance(event, Reasoning) else "tool_use"


def _empty_block(event: Event, new_id: NewId) -> dict[str, Any]:
    if isinstance(event, CallStart):
        return {"type": "tool_use", "id": new_id(event), "name": event.name, "input": ""}
    if isinstance(event, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; of a truncated call, those that are complete, as clients read a stream's."""
    try:
        return _OBJECT.validate_json(arguments, experimental_allow_partial=True)
    except ValueError:  # they are not an object
        return {}


def encode_event(body: dict[str, Any]) -> str:
    """Return a server-sent event; its name is its type."""
    return f"event: {body['type']}\ndata: {encode_json(body)}\n\n"


class BlockEvents:
    """Writes the server-sent events of the content of one response.

    Args:
        new_id: makes the ids of calls.
    """

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._index = -1  # of the current block
        self._type: str | None = None  # of the current block; None before the first one

    def write(self, events: Iterable[Event]) -> str:
        """Return the events of a piece of the answer."""
        return "".join(part for event in events for part in self._parts(event))

    def end(self) -> str:
        """Return the end of the last block."""
        if self._type is None:
            return ""
        stop = encode_event({"type": "content_block_stop", "index": self._index})
        return self._delta("signature_delta", "signature", SIGNATURE) + stop if self._type == "thinking" else stop

    def _parts(self, event: Event) -> Iterator[str]:
        text = "" if isinstance(event, CallStart) else event.text
        if _opens_block(event, self._type):
            yield self.end()
            yield self._start(event)
            if isinstance(event, Content) and self._index:
                text = text.lstrip()
        if not isinstance(event, CallStart):
            yield self._delta(*_TEXT_DELTAS[type(event)], text)

    def _start(self, event: Event) -> str:
        self._index += 1
        self._type = _type_of(event)
        block = _empty_block(event, self._new_id)
        if self._type == "tool_use":
            block["input"] = {}
        return encode_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, kind: str, name: str, text: str) -> str:
        delta = f'{{"type":"{kind}","{name}":{encode_basestring(text)}}}'
        data = f'{{"type":"content_block_delta","index":{self._index},"delta":{delta}}}'
        return f"event: content_block_delta\ndata: {data}\n\n"
