"""Reasoning between two markers at the start of an answer, as ``<think>`` ... ``</think>``."""

from __future__ import annotations

from collections.abc import Callable

from deployments.parsers.events import Content, Reasoning, Steps
from deployments.parsers.reader import Reader

__all__ = ["plain", "reasoning"]


def reasoning(
    reader: Reader, rest: Callable[[Reader], Steps[None]], markers: tuple[str, str], *, is_open: bool
) -> Steps[None]:
    """Read reasoning, if the answer starts with it, and leave what follows to ``rest``.

    Args:
        reader: at the start of the answer.
        rest: the parser of what follows.
        markers: before and after reasoning.
        is_open: the prompt already ends with the first marker, or the model leaves it out.
    """
    start = reader.position
    yield from reader.skip_space()
    if not (yield from reader.literal(markers[0])) and not is_open:
        reader.position = start
    else:
        yield Reasoning("")  # there was reasoning, even if it is empty
        yield from reader.until(markers[1:], Reasoning)
    yield from rest(reader)


def plain(reader: Reader) -> Steps[None]:
    """Read text without tool calls."""
    while (yield from reader.peek()):
        yield Content(reader.take())
