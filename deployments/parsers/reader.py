"""Reader: the text of an answer while it arrives, read by generators that wait for more.

The rule that makes a parser independent of how the text is cut: a method decides only when no further text could
change its decision, and otherwise yields None and looks again once there is more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from deployments.parsers.events import Event, Steps
from deployments.parsers.json_scanner import JsonScanner

__all__ = ["Family", "MalformedError", "Reader"]

_SPACE = " \n\t\r"


class MalformedError(Exception):
    """The text does not have the form that a tool call has; never leaves the parsers."""


class Reader:
    """The text of one answer, with a position up to which it has been read.

    Attributes:
        position: index of the next character; a parser may set it back to one that it has read since ``forget``.
    """

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self.position = 0

    def push(self, text: str, *, final: bool) -> None:
        """Append ``text``; with ``final``, no more will come."""
        self._text += text
        self._ended = final

    def forget(self) -> None:
        """Drop the text before the position."""
        self._text, self.position = self._text[self.position :], 0

    def take(self) -> str:
        """Read all the text that there is."""
        text = self._text[self.position :]
        self._text, self.position = "", 0
        return text

    def take_one(self) -> str:
        """Read one character, which there must be."""
        character = self._text[self.position]
        self.position += 1
        if self.position == len(self._text):
            self.forget()
        return character

    def until(self, markers: Sequence[str], event: Callable[[str], Event]) -> Steps[str | None]:
        """Emit the text before the first of ``markers``; returns the marker, which is read, or None at the end.

        No marker may contain another one, except at its end.
        """
        while True:
            matches = [(start, marker) for marker in markers if (start := self._text.find(marker, self.position)) >= 0]
            start, marker = min(matches) if matches else (len(self._text) - self._partial_marker_length(markers), None)
            if start > self.position:
                text, self.position = self._text[self.position : start], start
                yield event(text)
            if marker is not None:
                self.position += len(marker)
                return marker
            if self._ended:
                return None
            self.forget()
            yield None

    def take_until(self, markers: Sequence[str], *, limit: int, never: str = "") -> Steps[tuple[str, str]]:
        """Return the text before the first of ``markers``, and the marker; both are read.

        Args:
            markers: as for ``until``.
            limit: maximum length of the text.
            never: characters that the text cannot have.

        Raises:
            MalformedError: the text ends before, is longer, or has a character of ``never``.
        """
        begin = seen = self.position
        while True:
            matches = [(start, marker) for marker in markers if (start := self._text.find(marker, seen)) >= 0]
            end, marker = min(matches) if matches else (len(self._text) - self._partial_marker_length(markers), "")
            if end - begin > limit or any(self._text.find(marker, seen, end) >= 0 for marker in never):
                raise MalformedError
            if marker:
                self.position = end + len(marker)
                return self._text[begin:end], marker
            seen = end  # no marker starts before
            yield from self._more()

    def literal(self, expected: str) -> Steps[bool]:
        """Read ``expected`` if the text continues with it; returns whether it does."""
        while True:
            ahead = self._text[self.position : self.position + len(expected)]
            if ahead == expected:
                self.position += len(expected)
                return True
            if self._ended or not expected.startswith(ahead):
                return False
            yield None

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self.position == len(self._text) and not self._ended:
            yield None
        return self._text[self.position : self.position + 1]

    def skip_space(self) -> Steps[str]:
        """Read whitespace, and return the character after it as ``peek`` does."""
        while (character := (yield from self.peek())) and character in _SPACE:
            self.position += 1
        return character

    def expect(self, expected: str) -> Steps[None]:
        """Read whitespace and then ``expected``.

        Raises:
            MalformedError: the text continues otherwise.
        """
        yield from self.skip_space()
        if not (yield from self.literal(expected)):
            raise MalformedError

    def json(self, event: Callable[[str], Event] | None = None) -> Steps[str]:
        """Read a JSON value and emit its text, piece by piece as it comes; without ``event``, return the text.

        Raises:
            MalformedError: it is not JSON, or ends too early. What was valid has been read and emitted.
        """
        scanner, pieces = JsonScanner(), []
        while True:
            piece, self.position = scanner.scan(self._text, self.position)
            if piece and event is not None:
                yield event(piece)
            elif piece:
                pieces.append(piece)
            if scanner.is_done:
                return "".join(pieces)
            if scanner.has_failed:
                raise MalformedError
            if event is not None:
                self.forget()
            yield from self._more()

    def _more(self) -> Steps[None]:
        if self._ended:
            raise MalformedError
        yield None

    def _partial_marker_length(self, markers: Sequence[str]) -> int:
        """Return the length of the longest end of the text that may be the start of a marker."""
        if self._ended:
            return 0
        longest = min(max(map(len, markers)) - 1, len(self._text) - self.position)
        tail = self._text[len(self._text) - longest :]
        if not any(marker[0] in tail for marker in markers):
            return 0  # quickly, since nearly no text has one
        for start in range(longest):
            if any(marker.startswith(tail[start:]) for marker in markers):
                return longest - start
        return 0


Family: TypeAlias = Callable[[Reader], Steps[None]]  # the parser of one answer
