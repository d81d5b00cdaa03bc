"""Gemma 4 and FunctionGemma: ``call:name{key:<|"|>text<|"|>,n:3}``, with bare keys and a marker as quotes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring

from deployments.parsers.events import CallArguments, CallStart, Steps
from deployments.parsers.json_calls import checked_name
from deployments.parsers.marked import CallReader, Thoughts
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import ANY, Allowed, Tools
from deployments.parsers.typed_values import as_json, string_piece

__all__ = ["FUNCTION_GEMMA", "GEMMA4", "GEMMA4_DROPPED", "GEMMA4_THOUGHTS", "GemmaFormat"]

_MAX_NAME = 256
_MAX_BARE = 2**16  # characters of a value without quotes
_MAX_DEPTH = 64


@dataclass(frozen=True)
class GemmaFormat:
    """The markers of a format.

    Attributes:
        begin: before each call.
        end: after it.
        quote: before and after a string.
    """

    begin: str
    end: str
    quote: str

    @property
    def calls(self) -> Mapping[str, CallReader]:
        """What reads the calls, by the marker before them."""
        return {self.begin: partial(_call, format=self)}

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        return (self.begin, self.end, self.quote)


GEMMA4 = GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA4_THOUGHTS = Thoughts("<|channel>", "<channel|>", label="thought\n")
GEMMA4_DROPPED = ("<|tool_response>",)  # after the calls the model asks for their results
FUNCTION_GEMMA = GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>")


def _call(reader: Reader, tools: Tools, format: GemmaFormat) -> Steps[None]:
    yield from reader.expect("call:")
    name, _ = yield from reader.take_until(["{"], limit=_MAX_NAME, never="\n<")
    yield CallStart(checked_name(name.strip()))
    yield from _members(reader, format, depth=0)
    yield from reader.skip_space()
    yield from reader.literal(format.end)


def _members(reader: Reader, format: GemmaFormat, depth: int) -> Steps[None]:
    """Read an object after its bracket, and emit it as JSON."""
    separator = "{"
    if (yield from _ends(reader, "}")):
        yield CallArguments("{}")
        return
    while separator != "}":
        key = yield from _key(reader, format)
        yield CallArguments(f"{separator}{encode_basestring(key)}: ")
        yield from _value(reader, format, depth + 1)
        separator = "}" if (yield from _ends(reader, "}")) else ", "
        if separator != "}":
            yield from reader.expect(",")
    yield CallArguments("}")


def _items(reader: Reader, format: GemmaFormat, depth: int) -> Steps[None]:
    """Read a list after its bracket, and emit it as JSON."""
    yield CallArguments("[")
    if (yield from _ends(reader, "]")):
        yield CallArguments("]")
        return
    while True:
        yield from _value(reader, format, depth + 1)
        if (yield from _ends(reader, "]")):
            yield CallArguments("]")
            return
        yield from reader.expect(",")
        yield CallArguments(", ")


def _ends(reader: Reader, bracket: str) -> Steps[bool]:
    yield from reader.skip_space()
    return (yield from reader.literal(bracket))


def _key(reader: Reader, format: GemmaFormat) -> Steps[str]:
    yield from reader.skip_space()
    if (yield from reader.literal(format.quote)):
        key, _ = yield from reader.take_until([format.quote], limit=_MAX_NAME)
        yield from reader.expect(":")
        return key
    key, _ = yield from reader.take_until([":"], limit=_MAX_NAME, never="\n")
    return key


def _value(reader: Reader, format: GemmaFormat, depth: int) -> Steps[None]:
    """Read a value; a string is emitted as it comes."""
    if depth > _MAX_DEPTH:
        raise MalformedError
    first = yield from reader.skip_space()
    if first in ("{", "["):
        yield from reader.expect(first)
        yield from (_members if first == "{" else _items)(reader, format, depth)
    elif (yield from reader.literal(format.quote)):
        yield CallArguments('"')
        if (yield from reader.until([format.quote], string_piece)) is None:
            raise MalformedError
        yield CallArguments('"')
    else:
        text, _ = yield from reader.take_until([",", "}", "]"], limit=_MAX_BARE)
        reader.position -= 1
        yield CallArguments(as_json(text.strip(), Allowed({ANY})))
