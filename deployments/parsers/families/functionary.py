"""Functionary: ``<function=name>{...}</function>`` (v3.1), or messages that begin with a recipient's line (v3.2).

In v3.2 the prompt ends with ``>>>``. The answer is ``all``, a line break and text, or a function's name, a line break
and its arguments; further messages follow ``>>>``. Llama 3.1 writes the form of v3.1 for tools that a user describes.
"""

from __future__ import annotations

from collections.abc import Callable

from deployments.parsers.events import Content, Event, Steps
from deployments.parsers.json_calls import arguments, attempt
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import Tools

__all__ = ["FUNCTIONARY_CALLS", "functionary"]

_BEGIN, _NAME_END, _END = "<function=", ">", "</function>"
_NEXT, _EVERYONE = ">>>", "all"
_MAX_NAME = 256


def _call(reader: Reader, tools: Tools) -> Steps[None]:
    """Read a call of v3.1 after its marker, and its end."""
    name, _ = yield from reader.take_until([_NAME_END], limit=_MAX_NAME, never="\n<")
    yield from arguments(reader, name)
    yield from reader.skip_space()
    yield from reader.literal(_END)


FUNCTIONARY_CALLS = {_BEGIN: _call}


def functionary(reader: Reader, prompt: str, tools: Tools | None) -> Steps[None]:
    """Read messages of v3.2; without tools, those to functions are content.

    Args:
        reader: at the start of the answer.
        prompt: its end; it may have begun a message, which is then continued.
        tools: those that the answer may call.
    """
    event: Callable[[str], Event] = Content
    _, is_there, begun = prompt.rpartition(_NEXT)
    if not (is_there and "\n" in begun):
        yield from reader.literal(_NEXT)  # if the prompt does not end with it
        event = yield from _message(reader, tools or {}, "")
    while (marker := (yield from reader.until([_NEXT], event))) is not None:
        event = yield from _message(reader, tools or {}, marker)


def _message(reader: Reader, tools: Tools, marker: str) -> Steps[Callable[[str], Event]]:
    """Read the line before a message, and the message if it is a call; returns the kind of the text that follows.

    A line that names no function is text, with the ``marker`` before it.
    """
    start = reader.position
    try:
        recipient, _ = yield from reader.take_until(["\n"], limit=_MAX_NAME)
    except MalformedError:
        recipient = ""
    if recipient.strip() == _EVERYONE:
        return Content
    if recipient.strip() in tools and (yield from attempt(reader, arguments(reader, recipient.strip()))):
        return Content
    reader.position = start
    yield Content(marker)
    return Content
