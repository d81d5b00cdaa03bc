"""GPT-OSS (harmony): messages with a channel, ``<|channel|>analysis<|message|>...<|end|>``.

analysis                      reasoning; so are messages to built-in tools
final, commentary             content
... to=functions.name         a tool call, whose text is the arguments: a JSON object, or code or other text, which
                              becomes the function's only parameter, or else one called "input"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring

from deployments.parsers.events import CallArguments, CallStart, Content, Event, Reasoning, Steps
from deployments.parsers.json_calls import arguments, attempt, checked_name
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import Allowed, Schema, Tools
from deployments.parsers.typed_values import allowed_argument, as_json

__all__ = ["MARKERS", "harmony"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_MAX_HEADER = 512
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_PREFIX = "functions."
_INPUT = "input"  # the parameter of a text where none is known


def harmony(reader: Reader, prompt: str, *, tools: Tools | None) -> Steps[None]:
    """Read messages; without tools, those to functions are content. Text without a header is content.

    Args:
        reader: at the start of the answer.
        prompt: its end; it may have begun a message, which is then continued.
        tools: those that the answer may call.
    """
    event: Callable[[str], Event] = _begun(prompt)
    started: set[Callable[[str], Event]] = set()  # kinds that have had a message, which a line break separates
    if (yield from _starts_with_recipient(reader)) and (yield from _message(reader, "", tools)) is Reasoning:
        event = Reasoning
    while (marker := (yield from reader.until([_START, _CHANNEL, *_ENDS], event))) is not None:
        event = Content
        if marker in (_START, _CHANNEL):
            kind = yield from _message(reader, marker, tools)
            if kind is not None:
                if kind in started:
                    yield kind("\n")
                started.add(kind)
                event = kind


def _starts_with_recipient(reader: Reader) -> Steps[bool]:
    """Whether the answer starts with a header whose first marker ends the prompt: ``to=functions.f<|channel|>...``."""
    start = reader.position
    yield from reader.skip_space()
    is_header = yield from reader.literal("to=")
    reader.position = start
    return is_header


def _message(reader: Reader, marker: str, tools: Tools | None) -> Steps[Callable[[str], Event] | None]:
    """Read a message's header, and the call if it is one; returns the kind of a text that follows."""
    start = reader.position
    try:
        text, _ = yield from reader.take_until([_MESSAGE], limit=_MAX_HEADER)
    except MalformedError:
        reader.position = start
        yield Content(marker)
        return None
    recipient = _RECIPIENT.search(text)
    if recipient is not None and recipient[1].startswith(_PREFIX):
        name = recipient[1].removeprefix(_PREFIX)
        if tools is None:
            return Content
        if not (yield from attempt(reader, _call(reader, name))):
            yield from attempt(reader, _text_call(reader, name, tools.get(name, {})))
        return None
    return _kind(marker + text)


def _kind(header: str) -> Callable[[str], Event]:
    """Return the kind of a text with this header, which calls no function."""
    channel = _CHANNEL_NAME.search(header)
    is_reasoning = _RECIPIENT.search(header) is not None or (channel is not None and channel[1] == "analysis")
    return Reasoning if is_reasoning else Content


def _begun(prompt: str) -> Callable[[str], Event]:
    """Return the kind of the message that the prompt's end has begun; content if it has begun none."""
    before, _, text = prompt.rpartition(_MESSAGE)
    if any(end in text for end in _ENDS):
        return Content
    return _kind(before[max(before.rfind(marker) for marker in (_MESSAGE, *_ENDS)) + 1 :])


def _call(reader: Reader, name: str) -> Steps[None]:
    """Read a call's arguments; no text stands for none."""
    if (yield from reader.skip_space()) == "<" and (yield from reader.literal(_ENDS[1])):
        yield CallStart(checked_name(name))
        yield CallArguments("{}")
        return
    yield from arguments(reader, name)


def _text_call(reader: Reader, name: str, parameters: Schema) -> Steps[None]:
    """Read a call whose text is not an object: it is the value of one parameter."""
    yield CallStart(checked_name(name))
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    key = names[0] if len(names) == 1 else _INPUT
    text = yield from _text(reader)
    value = as_json(text, allowed_argument(parameters, key) if names == [key] else Allowed({"string"}))
    yield CallArguments(f"{{{encode_basestring(key)}: {value}}}")


def _text(reader: Reader) -> Steps[str]:
    """Read and return the text of a message."""
    pieces: list[str] = []
    steps = reader.until([_START, _CHANNEL, *_ENDS], Content)
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            reader.position -= len(end.value or "")
            return "".join(pieces)
        if event is None:
            yield None
        else:
            assert isinstance(event, Content)
            pieces.append(event.text)
