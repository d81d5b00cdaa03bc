"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

A value is text; the tool's schema decides which JSON it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from deployments.parsers.events import CallArguments, CallStart, Content, Steps
from deployments.parsers.json_calls import attempt, checked_name
from deployments.parsers.json_scanner import valid_json
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import property_schema, types_of

__all__ = ["MARKERS", "qwen3_coder"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (_BEGIN, _END)
_MAX_NAME = 256
_TYPE_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_MAX_VALUE = 2**20  # characters of a value that is not streamed


def qwen3_coder(reader: Reader, tools: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    """Read text and tool calls; ``tools`` are the parameters' schemas by name."""
    while (marker := (yield from reader.until([_BEGIN, _FUNCTION], Content))) is not None:
        if not (yield from attempt(reader, _call(reader, tools, is_wrapped=marker == _BEGIN))):
            yield Content(marker)
            continue
        yield from reader.skip_space()
        yield from reader.literal(_END)


def _call(reader: Reader, tools: Mapping[str, Mapping[str, Any]], *, is_wrapped: bool) -> Steps[None]:
    if is_wrapped:
        yield from reader.expect(_FUNCTION)
    name, _ = yield from reader.take_until([">"], limit=_MAX_NAME, never="\n<")
    parameters = tools.get(name, {})
    checked_name(name)
    has_ended = yield from _has_ended(reader)  # before the call is emitted: until here it may become text
    yield CallStart(name)
    opening = "{"
    while not has_ended:
        key, _ = yield from reader.take_until([">"], limit=_MAX_NAME, never="\n<")
        yield CallArguments(f"{opening}{encode_basestring(key)}: ")
        opening = ", "
        yield from _value(reader, types_of(property_schema(parameters, key, parameters), parameters))
        has_ended = yield from _has_ended(reader)
    yield CallArguments("{}" if opening == "{" else "}")


def _has_ended(reader: Reader) -> Steps[bool]:
    """Read the start of the next parameter, or the end of the call."""
    yield from reader.skip_space()
    if (yield from reader.literal(_FUNCTION_END)):
        return True
    yield from reader.expect(_PARAMETER)
    return False


def _value(reader: Reader, types: set[str]) -> Steps[None]:
    """Read a value of one of some types, which stands between two line breaks; a string is emitted as it comes.

    Raises:
        MalformedError: it does not end.
    """
    yield from reader.literal("\n")
    if types <= {"string"}:
        yield CallArguments('"')
        if (yield from reader.until([f"\n{_PARAMETER_END}", _PARAMETER_END], _string_piece)) is None:
            raise MalformedError
        yield CallArguments('"')
    else:
        text, _ = yield from reader.take_until([_PARAMETER_END], limit=_MAX_VALUE)
        yield CallArguments(_as_json(text.removesuffix("\n"), types))


def _string_piece(text: str) -> CallArguments:
    return CallArguments(encode_basestring(text)[1:-1])


def _as_json(text: str, types: set[str]) -> str:
    """Return the JSON that ``text`` stands for: itself, if it is JSON of one of ``types``, else a string."""
    stripped = text.strip()
    spelled = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    valid = valid_json(spelled)
    if valid is None:
        return encode_basestring(text)
    kind = _TYPE_OF.get(valid[0], "number")
    fits = kind in types or (kind == "number" and "integer" in types)
    return encode_basestring(text) if "string" in types and not fits else valid
