"""Muse Glimmer: messages with a recipient, `` to=user<|message|>...<|eom|>``; those to itself are reasoning.

Calls are tags in a message to the function. The prompt ends with the start of the first message's header.
"""

from __future__ import annotations

from collections.abc import Callable

from deployments.parsers.events import Content, Event, Reasoning, Steps
from deployments.parsers.families.xml_calls import ATEM
from deployments.parsers.json_calls import attempt
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import Tools

__all__ = ["MUSE_MARKERS", "muse_glimmer"]

_START, _MESSAGE, _NEXT, _LAST = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
MUSE_MARKERS = (_START, _MESSAGE, _NEXT, _LAST, *ATEM.markers)
_MAX_HEADER = 512


def muse_glimmer(reader: Reader, prompt: str, tools: Tools | None) -> Steps[None]:
    """Read messages; without tools, calls are content.

    Args:
        reader: at the start of the answer.
        prompt: its end; it may have begun a message, which is then continued.
        tools: those that the answer may call.
    """
    calls = {} if tools is None else ATEM.calls
    begun = _begun(prompt)
    event = (yield from _header(reader, "")) if begun is None else begun
    while (marker := (yield from reader.until([_START, _NEXT, _LAST, *calls], event))) is not None:
        if marker == _START:
            event = yield from _header(reader, marker)
        elif marker in calls and not (yield from attempt(reader, calls[marker](reader, tools or {}))):
            yield event(marker)


def _begun(prompt: str) -> Callable[[str], Event] | None:
    """Return the kind of the message that the prompt's end has begun, if there is one."""
    before, begins, text = prompt.rpartition(_MESSAGE)
    if not begins or _NEXT in text or _LAST in text:
        return None
    return Reasoning if before.endswith("to=self") else Content


def _header(reader: Reader, marker: str) -> Steps[Callable[[str], Event]]:
    """Read a message's header after ``marker``, and return the kind of its text; a text without a header is content."""
    start = reader.position
    yield from reader.skip_space()
    yield from reader.literal("assistant")
    yield from reader.skip_space()
    try:
        if (yield from reader.literal("to=")):
            recipient, _ = yield from reader.take_until([_MESSAGE], limit=_MAX_HEADER, never=" \n")
            return Reasoning if recipient == "self" else Content
        yield from reader.expect(_MESSAGE)
    except MalformedError:
        reader.position = start
        yield Content(marker)
    return Content
