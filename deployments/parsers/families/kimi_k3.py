"""Kimi K3: sections between ``<|open|>tag<|sep|>`` and ``<|close|>tag<|sep|>``: think, response, tools with calls.

A call has ``argument`` sections whose attributes name the key and the type, or one ``json`` section.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring

from deployments.parsers.events import CallArguments, CallStart, Steps
from deployments.parsers.json_calls import arguments, checked_name
from deployments.parsers.marked import Thoughts
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import ANY, Allowed, Tools
from deployments.parsers.typed_values import allowed_argument, as_json, string_piece

__all__ = ["KIMI_K3_CALLS", "KIMI_K3_DROPPED", "KIMI_K3_THOUGHTS", "KIMI_K3_TOKENS"]

_OPEN, _CLOSE, _SEPARATOR, _LAST = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_MAX_TAG = 1024
_MAX_VALUE = 2**20
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _close(tag: str) -> str:
    return f"{_CLOSE}{tag}{_SEPARATOR}"


def _call(reader: Reader, tools: Tools) -> Steps[None]:
    """Read a call's attributes, its arguments and its end."""
    name = checked_name((yield from _attributes(reader)).get("tool", ""))
    if (yield from _opens(reader, "json")):
        yield from _attributes(reader)
        yield from arguments(reader, name)
        yield from reader.expect(_close("json"))
        yield from reader.expect(_close("call"))
        return
    has_ended = yield from _has_ended(reader)  # before the call is emitted: until here it may become text
    yield CallStart(name)
    opening = "{"
    while not has_ended:
        attributes = yield from _attributes(reader)
        key = attributes.get("key", "")
        yield CallArguments(f"{opening}{encode_basestring(key)}: ")
        opening = ", "
        stated = attributes.get("type")
        allowed = allowed_argument(tools.get(name, {}), key) if stated is None else Allowed({stated})
        yield from _value(reader, allowed)
        has_ended = yield from _has_ended(reader)
    yield CallArguments("{}" if opening == "{" else "}")


def _has_ended(reader: Reader) -> Steps[bool]:
    if (yield from _opens(reader, "argument")):
        return False
    yield from reader.expect(_close("call"))
    return True


def _opens(reader: Reader, tag: str) -> Steps[bool]:
    yield from reader.skip_space()
    return (yield from reader.literal(f"{_OPEN}{tag} "))


def _attributes(reader: Reader) -> Steps[dict[str, str]]:
    """Read a tag's attributes and its end."""
    text, _ = yield from reader.take_until([_SEPARATOR], limit=_MAX_TAG, never="\n")
    attributes = _ATTRIBUTE.findall(text)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in attributes}


def _value(reader: Reader, allowed: Allowed) -> Steps[None]:
    """Read a value and the end of its section; a string is emitted as it comes."""
    end = _close("argument")
    if allowed.types <= {"string"}:
        yield CallArguments('"')
        if (yield from reader.until([end], string_piece)) is None:
            raise MalformedError
        yield CallArguments('"')
    else:
        text, _ = yield from reader.take_until([end], limit=_MAX_VALUE)
        yield CallArguments(as_json(text, allowed if "string" in allowed.types else Allowed({ANY})))


KIMI_K3_CALLS = {f"{_OPEN}call ": _call}
KIMI_K3_THOUGHTS = Thoughts(f"{_OPEN}think{_SEPARATOR}", _close("think"))
KIMI_K3_DROPPED = (
    *(f"{start}{tag}{_SEPARATOR}" for tag in ("response", "tools") for start in (_OPEN, _CLOSE)),
    _close("message"),
    _LAST,
)
KIMI_K3_TOKENS = (_OPEN, _CLOSE, _SEPARATOR, _LAST)
