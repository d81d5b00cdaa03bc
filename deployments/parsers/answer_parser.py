"""AnswerParser: feeds one answer's text to a family's parser and tidies the events that come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from deployments.parsers.events import CallStart, Content, Event, Reasoning, Steps
from deployments.parsers.reader import Reader

__all__ = ["AnswerParser"]

_PIECE = 4096  # characters; searching all of a long answer for each marker would take time quadratic in its length


class AnswerParser:
    """Turns the text of one answer into events. Joined, they do not depend on how the text is cut.

    Whitespace around reasoning and at the sides of tool calls is dropped, unless it separates two texts of the same
    kind. An answer that has neither stays as it is.

    Args:
        family: the parser of the model's format.
        max_calls: calls after this number are dropped; None for no limit.
        include_reasoning: whether reasoning is emitted.

    Attributes:
        num_calls: tool calls emitted so far.
        kind: of the last text or call, emitted or not; None before the first. A call is a CallStart.
        has_reasoning: whether the answer has reasoning, emitted or not.
    """

    def __init__(
        self, family: Callable[[Reader], Steps[None]], *, max_calls: int | None = None, include_reasoning: bool = True
    ) -> None:
        self._reader = Reader()
        self._steps = family(self._reader)
        self._max_calls = max_calls
        self._include_reasoning = include_reasoning
        self.kind: type[Event] | None = None
        self.has_reasoning = False
        self._space: dict[type[Event], list[str]] = {Content: [], Reasoning: []}  # whitespace that was held back
        self._started: set[type[Event]] = set()  # kinds that have had an event
        self._is_dropped = False  # whether the last call was
        self.num_calls = 0

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        """Return the events that ``text`` completes; with ``final``, also those of text that was held back."""
        events: list[Event] = []
        for start in range(0, len(text) or 1, _PIECE):
            end = start + _PIECE
            self._reader.push(text[start:end], final=final and end >= len(text))
            events += [event for parsed in self._parsed() for event in self._tidied(parsed)]
        if final and self.kind in (Content, None):
            events.append(Content("".join(self._space[Content])))
        return list(_joined(events))

    def _parsed(self) -> Iterator[Event]:
        """Yield the family's events, until it needs more text."""
        for event in self._steps:
            if event is None:
                return
            yield event

    def _tidied(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Content | Reasoning):
            yield from self._text(event)
        elif isinstance(event, CallStart):
            self.kind = CallStart
            self._is_dropped = self.num_calls == self._max_calls
            if not self._is_dropped:
                self.num_calls += 1
                yield event
        elif not self._is_dropped:
            yield event

    def _text(self, event: Content | Reasoning) -> Iterator[Event]:
        """Emit text without its last whitespace, which is held back until more text of this kind follows."""
        kind = type(event)
        shown = event.text.rstrip()
        space = event.text[len(shown) :]
        if kind is Reasoning:
            self.kind, self.has_reasoning = kind, True
        if not shown:
            self._space[kind].append(space)
            return
        shown = "".join(self._space[kind]) + shown
        self._space[kind] = [space]
        if kind not in self._started and (kind is Reasoning or self.kind is not None):
            shown = shown.lstrip()
        self._started.add(kind)
        self.kind = kind
        if kind is Content or self._include_reasoning:
            yield kind(shown)


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join neighbours that are pieces of the same text."""
    wanted = (event for event in events if not isinstance(event, Content) or event.text)
    for kind, group in groupby(wanted, type):
        if kind is CallStart:
            yield from group
        else:
            yield kind("".join(event.text for event in group if not isinstance(event, CallStart)))
