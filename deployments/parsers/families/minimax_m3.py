"""MiniMax-M3: tags after ``]<]minimax[>[``; each argument is a tag of its name, and lists and objects are tags in it.

A list is written as tags named ``item``. Text is a value whose type the tool's schema decides.
"""

from __future__ import annotations

from json.encoder import encode_basestring

from deployments.parsers.events import CallArguments, CallStart, Steps
from deployments.parsers.json_calls import checked_name
from deployments.parsers.marked import Thoughts
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import ANY, Allowed, SchemaPart, Tools
from deployments.parsers.typed_values import as_json, string_piece

__all__ = ["MINIMAX_M3_CALLS", "MINIMAX_M3_MARKERS", "MINIMAX_M3_THOUGHTS"]

_NAMESPACE = "]<]minimax[>["
_BEGIN, _END = f"{_NAMESPACE}<tool_call>", f"{_NAMESPACE}</tool_call>"
_INVOKE, _INVOKE_END = f'{_NAMESPACE}<invoke name="', f"{_NAMESPACE}</invoke>"
_ITEM = "item"
_EMPTY = {"array": "[]", "object": "{}"}
_MAX_NAME = 256
_MAX_VALUE = 2**20
_MAX_DEPTH = 64


def _calls(reader: Reader, tools: Tools) -> Steps[None]:
    """Read the calls of a block, and its end."""
    yield from reader.expect(_INVOKE)
    yield from _call(reader, tools)
    yield from reader.skip_space()
    while (yield from reader.literal(_INVOKE)):
        yield from _call(reader, tools)
        yield from reader.skip_space()
    yield from reader.literal(_END)


def _call(reader: Reader, tools: Tools) -> Steps[None]:
    name, _ = yield from reader.take_until(['">'], limit=_MAX_NAME, never="\n<")
    parameters = SchemaPart.of(tools.get(checked_name(name), {}))
    key = yield from _next_tag(reader, _INVOKE_END)  # before the call is emitted: until here it may become text
    yield CallStart(name)
    opening = "{"
    while key is not None:
        yield CallArguments(f"{opening}{encode_basestring(key)}: ")
        opening = ", "
        yield from _argument(reader, key, parameters.property(key))
        key = yield from _next_tag(reader, _INVOKE_END)
    yield CallArguments("{}" if opening == "{" else "}")


def _argument(reader: Reader, key: str, schema: SchemaPart) -> Steps[None]:
    """Read an argument and its end tag; a string is emitted as it comes."""
    if schema.types != {"string"}:
        yield CallArguments((yield from _value(reader, key, schema, depth=0)))
        return
    yield CallArguments('"')
    if (yield from reader.until([_end_tag(key)], string_piece)) is None:
        raise MalformedError
    yield CallArguments('"')


def _value(reader: Reader, key: str, schema: SchemaPart, depth: int) -> Steps[str]:
    """Read a value and its end tag; returns it as JSON."""
    if depth > _MAX_DEPTH:
        raise MalformedError
    text, _ = yield from reader.take_until([_NAMESPACE], limit=_MAX_VALUE)
    reader.position -= len(_NAMESPACE)
    allowed = schema.allowed
    if (yield from reader.literal(_end_tag(key))):
        empty = next((brackets for kind, brackets in _EMPTY.items() if kind in allowed.types), None)
        if empty is not None and not text.strip():
            return empty
        return as_json(text, allowed if allowed.types else Allowed({ANY} if depth else {"string"}))
    if text.strip():
        raise MalformedError
    members: list[tuple[str, str]] = []
    while (child := (yield from _next_tag(reader, _end_tag(key)))) is not None:
        inner = schema.item(len(members)) if child == _ITEM else schema.property(child)
        members.append((child, (yield from _value(reader, child, inner, depth + 1))))
    if "object" not in allowed.types and all(child == _ITEM for child, _ in members):
        return f"[{', '.join(value for _, value in members)}]"
    return f"{{{', '.join(f'{encode_basestring(child)}: {value}' for child, value in members)}}}"


def _next_tag(reader: Reader, end: str) -> Steps[str | None]:
    """Read the next start tag and return its name; None after ``end``."""
    yield from reader.skip_space()
    if (yield from reader.literal(end)):
        return None
    yield from reader.expect(f"{_NAMESPACE}<")
    name, _ = yield from reader.take_until([">"], limit=_MAX_NAME, never="\n</ ")
    return name


def _end_tag(key: str) -> str:
    return f"{_NAMESPACE}</{key}>"


MINIMAX_M3_CALLS = {_BEGIN: _calls}
MINIMAX_M3_MARKERS = (_BEGIN, _END, _NAMESPACE, "<tool_call>", "</tool_call>")
MINIMAX_M3_THOUGHTS = Thoughts("<mm:think>", "</mm:think>")
