"""decode_json: JSON of many megabytes, decoded in a thread without holding up the threads beside it.

Python's decoder is one call in C, which keeps the interpreter's lock: 16 MB of token ids stop every stream of the
process for a tenth of a second. Here that decoder gets about 64 KB at a time, and the thread sleeps between two parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from json import JSONDecodeError
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import Any, NoReturn

__all__ = ["STEP", "decode_json", "yield_lock"]

STEP = 2**16  # characters, or values; about half a millisecond
_FIRST_WINDOW = 2**10
_PAUSE_S = 5e-5
_MAX_DEPTH = 32  # of containers that are read in parts
_ENDS = {'"': '",', "{": "},", "[": "],"}  # of an element and the comma after it, by the element's first character


def yield_lock() -> None:
    """Let the threads that wait for the interpreter's lock take it; they need some microseconds to wake up."""
    time.sleep(_PAUSE_S)


def decode_json(data: bytes | bytearray | str, *, step: int = STEP, pause: Callable[[], None] = yield_lock) -> Any:
    """Return the value of a JSON document, as ``json.loads`` does, but reject NaN and infinities.

    Args:
        data: text, or bytes in an encoding that JSON allows, with or without unpaired surrogates.
        step: characters to decode between two pauses; a shorter document is decoded at once.
        pause: called between two steps.

    Raises:
        ValueError: the data is not JSON; the message says where.
        RecursionError: it is nested too deeply, or 32 deep around a container of more than ``step`` characters.
    """
    text = data if isinstance(data, str) else _decoded(data, step, pause)
    if text.startswith("\ufeff"):
        raise JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    return _DECODER.decode(text) if len(text) <= step else _Steps(text, step, pause).decode()


def _decoded(data: bytes | bytearray, step: int, pause: Callable[[], None]) -> str:
    """Return the text of a document, decoded in parts if it has other than ASCII characters."""
    encoding = json.detect_encoding(data)
    if len(data) <= step or encoding != "utf-8" or data.isascii():  # ASCII is copied as it is
        return data.decode(encoding, "surrogatepass")
    parts, start = [], 0
    try:
        while start < len(data):
            end = start + step
            while end < len(data) and data[end] & 0xC0 == 0x80 and end > start + 1:  # within a character
                end -= 1
            parts.append(data[start:end].decode(encoding, "surrogatepass"))
            start = end
            pause()
    except UnicodeDecodeError:
        return data.decode(encoding, "surrogatepass")  # this error says where in the whole
    return "".join(parts)


class _Steps:
    """Decodes one text.

    Args:
        text: the document.
        step: characters between two pauses.
        pause: called between two steps.
    """

    def __init__(self, text: str, step: int, pause: Callable[[], None]) -> None:
        self._text = text
        self._step = step
        self._pause = pause
        self._pause_at = step  # index of the text

    def decode(self) -> Any:
        """Return the value of the document."""
        value, end = self._value(self._skip(0), 0)
        if (end := self._skip(end)) != len(self._text):
            raise JSONDecodeError("Extra data", self._text, end)
        return value

    def _value(self, start: int, depth: int) -> tuple[Any, int]:
        """Return the value at ``start``, and the index after it."""
        self._reach(start)
        first = self._text[start : start + 1]
        if first not in ("[", "{"):
            return _DECODER.raw_decode(self._text, start)
        if depth >= _MAX_DEPTH:
            return self._deep_value(start)
        return (self._array if first == "[" else self._object)(self._skip(start + 1), depth)

    def _deep_value(self, start: int) -> tuple[Any, int]:
        """Return a container that is at most a step long; a longer one at this depth would be one long call."""
        if start + self._step >= len(self._text):
            return _DECODER.raw_decode(self._text, start)
        try:
            value, length = _DECODER.raw_decode(self._text[start : start + self._step])
        except JSONDecodeError:
            problem = f"{_MAX_DEPTH} containers around one of more than {self._step} characters"
            raise RecursionError(f"{problem}, at char {start}") from None
        return value, start + length

    def _object(self, index: int, depth: int) -> tuple[dict[str, Any], int]:
        text = self._text
        values: dict[str, Any] = {}
        if text.startswith("}", index):
            return values, index + 1
        while True:
            if not text.startswith('"', index):
                raise JSONDecodeError("Expecting property name enclosed in double quotes", text, index)
            name, index = _DECODER.raw_decode(text, index)
            if not text.startswith(":", index := self._skip(index)):
                raise JSONDecodeError("Expecting ':' delimiter", text, index)
            values[name], index = self._value(self._skip(index + 1), depth + 1)
            if text.startswith("}", index := self._skip(index)):
                return values, index + 1
            index = self._after_comma(index)

    def _array(self, index: int, depth: int) -> tuple[list[Any], int]:
        text = self._text
        values: list[Any] = []
        if text.startswith("]", index):
            return values, index + 1
        window, one_by_one_until = min(_FIRST_WINDOW, self._step), 0
        while True:
            if index >= one_by_one_until:
                if (part := self._part(index, window)) is not None:
                    several, index, has_ended = part
                    values += several
                    if has_ended:
                        return values, index
                    window = min(4 * window, self._step)
                    self._reach(index)
                    continue
                one_by_one_until = index + window
            value, index = self._value(index, depth + 1)
            values.append(value)
            if text.startswith("]", index := self._skip(index)):
                return values, index + 1
            index = self._after_comma(index)

    def _part(self, start: int, length: int) -> tuple[list[Any], int, bool] | None:
        """Decode the elements of an array in a part of the text at once; None if they must be read one by one.

        The part is cut at a comma that follows the kind of element with which it begins. If the part before the comma
        is an array by itself, it is what a decoder reads up to there, since nothing after a character changes what the
        character means. Otherwise the comma is inside an element.

        Returns:
            The elements, the index of the next one, and whether the array has ended; then the index is that after it.
        """
        text = self._text
        first = text[start : start + 1]
        separator = _ENDS.get(first, ",")
        comma = text.rfind(separator, start, start + length) + len(separator) - 1
        if first == "]" or comma <= start:
            return None
        try:
            values, end = _DECODER.raw_decode(f"[{text[start:comma]}]")
        except (ValueError, RecursionError):
            return None
        if end == comma - start + 2:
            return values, self._skip(comma + 1), False
        return values, start + end - 1, True

    def _after_comma(self, index: int) -> int:
        if not self._text.startswith(",", index):
            raise JSONDecodeError("Expecting ',' delimiter", self._text, index)
        return self._skip(index + 1)

    def _skip(self, index: int) -> int:
        """Return the index of the next character that is not white space."""
        end: int = WHITESPACE.match(self._text, index).end()
        return end

    def _reach(self, index: int) -> None:
        """Pause if enough characters have been decoded."""
        if index >= self._pause_at:
            self._pause_at = index + self._step // 2  # a part is a little shorter than a step
            self._pause()


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)  # json.loads makes a new one for each call with options
