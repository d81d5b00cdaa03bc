"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, anywhere in the text."""

from __future__ import annotations

from deployments.parsers.events import Content, Steps
from deployments.parsers.json_calls import attempt, calls
from deployments.parsers.reader import Reader

__all__ = ["MARKERS", "hermes"]

MARKERS = ("<tool_call>", "</tool_call>")


def hermes(reader: Reader) -> Steps[None]:
    """Read text and tool calls."""
    start, end = MARKERS
    while (yield from reader.until([start], Content)) is not None:
        if not (yield from attempt(reader, calls(reader))):
            yield Content(start)
            continue
        while (yield from reader.skip_space()) == "{" and (yield from attempt(reader, calls(reader))):
            pass  # several calls between two markers
        yield from reader.literal(end)
