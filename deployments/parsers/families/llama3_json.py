"""Llama 3 and 4: an answer that is ``{"name": ..., "parameters": {...}}``, or has it after ``<|python_tag|>``.

Several calls are separated by semicolons or whitespace, or are a list. Without a marker, only JSON that names one of
the request's tools is a call.
"""

from __future__ import annotations

from collections.abc import Container

from deployments.parsers.events import Content, Steps
from deployments.parsers.json_calls import attempt, calls
from deployments.parsers.reader import Reader

__all__ = ["MARKERS", "llama3_json"]

MARKERS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


def llama3_json(reader: Reader, tools: Container[str]) -> Steps[None]:
    """Read tool calls at the start or after a marker, and text."""
    start = reader.position
    yield from reader.skip_space()
    if not (yield from _calls(reader, tools)):
        reader.position = start
    while (marker := (yield from reader.until(MARKERS, Content))) is not None:
        if not (yield from _calls(reader, tools)):
            yield Content(marker)


def _calls(reader: Reader, tools: Container[str]) -> Steps[bool]:
    """Read as many calls as there are; returns whether there was one."""
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
            yield from reader.literal(MARKERS[-1])
            return True
