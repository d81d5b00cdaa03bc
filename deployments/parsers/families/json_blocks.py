"""Calls as JSON after a marker: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, in a table of markers.

Hermes and Qwen, Ernie, Hunyuan, Jamba, Apriel, Granite, Phi-4-mini, Command, LongCat, InternLM, GigaChat and Apertus
differ in the markers, and in whether they write objects or a list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from deployments.parsers.events import Steps
from deployments.parsers.json_calls import arguments, attempt, calls
from deployments.parsers.marked import CallReader
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import Tools

__all__ = ["HERMES_MARKERS", "JSON_FORMATS", "JsonFormat"]


@dataclass(frozen=True)
class JsonFormat:
    """The markers of a format.

    Attributes:
        begins: the markers that may come before the calls.
        end: after the calls; it may be missing.
        name_key: the key of a function's name; empty if the name is itself the key of the arguments.
        dropped: markers around other text, which are not part of it.
    """

    begins: tuple[str, ...]
    end: str = ""
    name_key: str = "name"
    dropped: tuple[str, ...] = ()

    @property
    def calls(self) -> Mapping[str, CallReader]:
        """What reads the calls, by the marker before them."""
        return {begin: partial(_block, format=self) for begin in self.begins}

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        return (*self.begins, *((self.end,) if self.end else ()), *self.dropped)


HERMES_MARKERS = ("<tool_call>", "</tool_call>")
JSON_FORMATS: Mapping[str, JsonFormat] = {
    "hermes": JsonFormat(HERMES_MARKERS[:1], HERMES_MARKERS[1]),
    "ernie45": JsonFormat(("<tool_call>",), "</tool_call>", dropped=("<response>", "\n</response>", "</response>")),
    "hunyuan_a13b": JsonFormat(("<tool_calls>",), "</tool_calls>"),
    "granite": JsonFormat(("<|tool_call|>", "<tool_call>")),
    "phi4_mini_json": JsonFormat(("<|tool_call|>", "functools"), "<|/tool_call|>"),
    "cohere_command3": JsonFormat(
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        name_key="tool_name",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "nemotron_json": JsonFormat(("<TOOLCALL>",), "</TOOLCALL>"),
    "longcat": JsonFormat(("<longcat_tool_call>",), "</longcat_tool_call>"),
    "internlm": JsonFormat(("<|action_start|><|plugin|>",), "<|action_end|>"),
    "gigachat3": JsonFormat(("<|function_call|>", "function call<|role_sep|>\n"), dropped=("<|message_sep|>\n\n",)),
    "apertus": JsonFormat(("<|tools_prefix|>",), "<|tools_suffix|>", name_key=""),
}


def _block(reader: Reader, tools: Tools, format: JsonFormat) -> Steps[None]:
    """Read the calls after a marker, one or several objects or lists, and ``end``."""
    first = yield from reader.skip_space()
    if not (yield from attempt(reader, _calls(reader, format))):
        raise MalformedError
    while first == "{" and (yield from reader.skip_space()) == "{":
        if not (yield from attempt(reader, _calls(reader, format))):
            break
    if format.end:
        yield from reader.skip_space()
        yield from reader.literal(format.end)


def _calls(reader: Reader, format: JsonFormat) -> Steps[None]:
    if format.name_key:
        yield from calls(reader, name_key=format.name_key)
        return
    yield from reader.expect("[")
    while True:
        yield from _named_arguments(reader)
        if (yield from reader.skip_space()) == "]":
            yield from reader.expect("]")
            return
        yield from reader.expect(",")


def _named_arguments(reader: Reader) -> Steps[None]:
    """Read an object whose only key is the function's name, and whose value are the arguments."""
    yield from reader.expect("{")
    if (yield from reader.skip_space()) != '"':
        raise MalformedError
    name = str(json.loads((yield from reader.json())))
    yield from reader.expect(":")
    yield from arguments(reader, name)
    yield from reader.expect("}")
