"""StopStringFilter: ends a stream of text at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStringFilter"]


class StopStringFilter:
    """Passes text on until a stop string appears. It holds back text that may be the start of a stop string.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._first_characters = {stop[0] for stop in self._stop_strings if stop}
        self._longest_prefix = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, final: bool = False) -> str:
        """Append ``text`` and return the text that can be shown now; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        matches = [(text.find(stop), stop) for stop in self._stop_strings if stop in text]
        if matches:
            position, self.matched = min(matches, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[: position + len(self.matched)] if self._include_stop else text[:position]
        keep = 0 if final else self._length_of_partial_match(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _length_of_partial_match(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is the start of a stop string."""
        for position in range(max(0, len(text) - self._longest_prefix), len(text)):
            if text[position] in self._first_characters:
                suffix = text[position:]
                if any(stop.startswith(suffix) for stop in self._stop_strings):
                    return len(suffix)
        return 0
