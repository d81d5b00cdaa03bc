"""The loop of formats whose tool calls follow markers: text, reasoning and calls in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from deployments.parsers.events import Content, Reasoning, Steps
from deployments.parsers.json_calls import attempt
from deployments.parsers.reader import Reader
from deployments.parsers.schema_types import Tools

__all__ = ["CallReader", "Thoughts", "marked", "thoughts"]

# Reads what follows a marker: one call or several, and their end; ``tools`` are the parameters' schemas by name.
CallReader: TypeAlias = Callable[[Reader, Tools], Steps[None]]


@dataclass(frozen=True)
class Thoughts:
    """How reasoning is marked.

    Attributes:
        begin: before it.
        end: after it.
        label: what may follow ``begin`` and is not reasoning, such as a channel's name.
        interrupts: markers of calls, which end reasoning that has no end marker.
    """

    begin: str
    end: str
    label: str = ""
    interrupts: tuple[str, ...] = ()


def thoughts(reader: Reader, format: Thoughts) -> Steps[None]:
    """Read reasoning after its first marker, and its end."""
    yield Reasoning("")  # there was reasoning, even if it is empty
    if format.label:
        yield from reader.literal(format.label)
    marker = yield from reader.until([format.end, *format.interrupts], Reasoning)
    if marker in format.interrupts:
        reader.position -= len(marker)


def marked(
    reader: Reader,
    tools: Tools,
    calls: Mapping[str, CallReader],
    *,
    reasoning: Thoughts | None = None,
    dropped: Sequence[str] = (),
) -> Steps[None]:
    """Read text, the calls after markers and reasoning; a marker without a call is text.

    Args:
        reader: at the start of the answer, or after its first reasoning.
        tools: the request's.
        calls: what reads the calls, by the marker before them.
        reasoning: how it is marked, if it may also come later than at the start.
        dropped: markers around text, which are not part of it.
    """
    begins = [] if reasoning is None else [reasoning.begin]
    while (marker := (yield from reader.until([*calls, *begins, *dropped], Content))) is not None:
        if reasoning is not None and marker == reasoning.begin:
            yield from thoughts(reader, reasoning)
        elif marker in calls and not (yield from attempt(reader, calls[marker](reader, tools))):
            yield Content(marker)
