"""AnswerParser: feeds one answer's text to a family's parser and tidies the events that come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deployments.api.parsers.events import CallArguments, CallStart, Content, Event, Reasoning, Steps
from deployments.api.parsers.reader import Reader

__all__ = ["AnswerParser"]


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
    """

    def __init__(
        self, family: Callable[[Reader], Steps[None]], *, max_calls: int | None = None, include_reasoning: bool = True
    ) -> None:
        self._reader = Reader()
        self._steps = family(self._reader)
        self._max_calls = max_calls
        self._include_reasoning = include_reasoning
        self._last: type[Event] | None = None  # the kind of the last event
        self._space = {Content: "", Reasoning: ""}  # whitespace that was held back, of each kind of text
        self._begun: set[type[Event]] = set()  # kinds that have had an event
        self._is_dropped = False  # whether the last call was
        self.num_calls = 0

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        """Return the events that ``text`` completes; with ``final``, also those of text that was held back."""
        self._reader.push(text, final=final)
        events = [event for found in self._found() for event in self._tidied(found)]
        if final and self._last in (Content, None):
            events.append(Content(self._space[Content]))
        return list(_joined(events))

    def _found(self) -> Iterator[Event]:
        """Yield the family's events, until it needs more text."""
        for event in self._steps:
            if event is None:
                return
            yield event

    def _tidied(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Content | Reasoning):
            yield from self._text(event)
        elif isinstance(event, CallStart):
            self._last = CallStart
            self._is_dropped = self.num_calls == self._max_calls
            if not self._is_dropped:
                self.num_calls += 1
                yield event
        elif not self._is_dropped:
            yield event

    def _text(self, event: Content | Reasoning) -> Iterator[Event]:
        """Emit text without its last whitespace, which is held back until more text of this kind follows."""
        kind = type(event)
        text = self._space[kind] + event.text
        shown = text.rstrip()
        self._space[kind] = text[len(shown) :]
        if kind is Reasoning:
            self._last = kind
        if not shown:
            return
        if kind not in self._begun and (kind is Reasoning or self._last is not None):
            shown = shown.lstrip()
        self._begun.add(kind)
        self._last = kind
        if kind is Content or self._include_reasoning:
            yield kind(shown)


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join neighbours that are pieces of the same text."""
    last: Event | None = None
    for event in events:
        if isinstance(event, Content) and not event.text:
            continue
        if last is not None and type(event) is type(last) and not isinstance(event, CallStart):
            assert isinstance(last, Content | Reasoning | CallArguments)
            assert not isinstance(event, CallStart)
            last = type(last)(last.text + event.text)
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
