"""Reasoning between two markers at the start of an answer, as ``<think>`` ... ``</think>``."""

from __future__ import annotations

from deployments.parsers.events import Content, Steps
from deployments.parsers.marked import Thoughts, thoughts
from deployments.parsers.reader import Family, Reader

__all__ = ["plain", "reasoning"]


def reasoning(reader: Reader, rest: Family, markers: Thoughts, *, is_open: bool) -> Steps[None]:
    """Read reasoning, if the answer starts with it, and leave what follows to ``rest``.

    Args:
        reader: at the start of the answer.
        rest: the parser of what follows.
        markers: of the reasoning.
        is_open: the prompt already ends with the first marker, or the model leaves it out.
    """
    start = reader.position
    yield from reader.skip_space()
    if not (yield from reader.literal(markers.begin)) and not is_open:
        reader.position = start
    else:
        yield from thoughts(reader, markers)
    yield from rest(reader)


def plain(reader: Reader) -> Steps[None]:
    """Read text without tool calls."""
    while (yield from reader.peek()):
        yield Content(reader.take())
