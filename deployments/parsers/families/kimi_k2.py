"""Kimi K2: each call has the model's own id, ``functions.name:index``, before its JSON arguments.

The template expects the id in the next turn, so it is also the call's id in the answer.
"""

from __future__ import annotations

import re

from deployments.parsers.events import CallArguments, CallStart, Steps
from deployments.parsers.json_calls import arguments, checked_name
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import Tools

__all__ = ["KIMI_K2_CALLS", "KIMI_K2_MARKERS"]

_FIRST, _LAST = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MAX_ID = 512
_ID = re.compile(r"functions\.([^\s:]+):\d+")
_OTHER_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def _section(reader: Reader, tools: Tools) -> Steps[None]:
    """Read the calls of a section, and its end."""
    yield from reader.expect(_BEGIN)
    yield from _call(reader, tools)
    yield from reader.skip_space()
    while (yield from reader.literal(_BEGIN)):
        yield from _call(reader, tools)
        yield from reader.skip_space()
    yield from reader.literal(_LAST)


def _call(reader: Reader, tools: Tools) -> Steps[None]:
    """Read a call after its marker, and its end. An id of another form, such as a plain name, is replaced by ours."""
    text, _ = yield from reader.take_until([_ARGUMENTS], limit=_MAX_ID, never="<")
    given = text.strip()
    exact = _ID.fullmatch(given)
    if (match := exact or _OTHER_ID.fullmatch(given)) is None:
        raise MalformedError
    call_id = given if exact else None
    if (yield from reader.skip_space()) == "<" and (yield from reader.literal(_END)):
        yield CallStart(checked_name(match[1]), call_id)
        yield CallArguments("{}")
        return
    yield from arguments(reader, match[1], call_id)
    yield from reader.skip_space()
    yield from reader.literal(_END)


KIMI_K2_CALLS = {_FIRST: _section, _BEGIN: _call}
KIMI_K2_MARKERS = (_FIRST, _LAST, _BEGIN, _ARGUMENTS, _END)
