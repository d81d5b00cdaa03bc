"""Mistral: ``[TOOL_CALLS]`` before a JSON list of calls, or before each call as ``name[ARGS]{...}``."""

from __future__ import annotations

from deployments.parsers.events import Content, Steps
from deployments.parsers.json_calls import arguments, attempt, calls
from deployments.parsers.reader import Reader

__all__ = ["MARKERS", "mistral"]

MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_MAX_NAME = 256


def mistral(reader: Reader) -> Steps[None]:
    """Read text and tool calls."""
    start = MARKERS[0]
    while (yield from reader.until([start], Content)) is not None:
        if not (yield from attempt(reader, _calls(reader))):
            yield Content(start)


def _calls(reader: Reader) -> Steps[None]:
    """Read what follows the first marker: calls in JSON, or one call whose name is outside its JSON."""
    if (yield from reader.skip_space()) in ("[", "{"):
        yield from calls(reader)
        return
    _, call_id, args = MARKERS
    name, marker = yield from reader.take_until([call_id, args, "{"], limit=_MAX_NAME, never="\n[]")
    if marker == call_id:  # our own ids are sent
        _, marker = yield from reader.take_until([args, "{"], limit=_MAX_NAME, never="\n[]")
    if marker == "{":
        reader.position -= 1
    yield from arguments(reader, name.strip())
