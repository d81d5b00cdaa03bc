"""Llama 3 and 4: an answer that is ``{"name": ..., "parameters": {...}}``, or has it after ``<|python_tag|>``.

xLAM writes the same after other markers, also as a code block. Several calls are separated by semicolons or
whitespace, or are a list. Without a marker, only JSON that names one of the request's tools is a call.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from deployments.parsers.events import Content, Steps
from deployments.parsers.json_calls import attempt, calls
from deployments.parsers.reader import Reader

__all__ = ["MARKERS", "XLAM_MARKERS", "llama3_json"]

MARKERS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_FENCE = "```"
XLAM_MARKERS = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", _FENCE)
_ENDS = ("<|python_end|>", "</tool_call>", _FENCE)


def llama3_json(reader: Reader, tools: Container[str], markers: Sequence[str] = MARKERS) -> Steps[None]:
    """Read tool calls of ``tools`` at the start or after one of ``markers``, and text."""
    start = reader.position
    yield from reader.skip_space()
    if not (yield from _calls(reader, tools, markers)):
        reader.position = start
    while (marker := (yield from reader.until(markers, Content))) is not None:
        start = reader.position
        if marker == _FENCE:
            yield from reader.literal("json")
        if not (yield from _calls(reader, tools, markers)):
            reader.position = start
            yield Content(marker)


def _calls(reader: Reader, tools: Container[str], markers: Sequence[str]) -> Steps[bool]:
    """Read as many calls as there are, and a marker after them; returns whether there was a call."""
    if not (yield from attempt(reader, calls(reader, tools))):
        return False
    while True:
        end = reader.position
        if (yield from reader.skip_space()) == ";":
            yield from reader.literal(";")
            yield from reader.skip_space()
        if not (yield from attempt(reader, calls(reader, tools))):
            reader.position = end
            yield from reader.skip_space()
            for marker in _ENDS:
                if marker in markers and (yield from reader.literal(marker)):
                    break
            return True
