"""Cursor: reads the numbers, strings and arrays of a GGUF header one after another, never beyond the file's end."""

from __future__ import annotations

import struct
from typing import Any

from engine.errors import shown

__all__ = ["Cursor", "FormatError"]

MAX_HEADER_BYTES = 2**28  # the largest vocabularies with their merges take a tenth of that
_SCALARS = {  # type numbers of metadata, and struct's letters
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")


class FormatError(ValueError):
    """The bytes are not what the format says. The message is a clause about the file."""


class Cursor:
    """A position in a file's bytes.

    Args:
        memory: the bytes.
        size: how many there are.
    """

    def __init__(self, memory: Any, size: int) -> None:
        self._memory = memory
        self.size = size
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes; raise FormatError if the header or the file ends before."""
        stop = self.position + count
        if stop > self.size:
            raise FormatError(f"it has {self.size} bytes, so it is cut off in {what}")
        if stop > MAX_HEADER_BYTES:
            raise FormatError(f"its header has more than {MAX_HEADER_BYTES} bytes, at {what}")
        taken: bytes = self._memory[self.position : stop]
        self.position = stop
        return taken

    def integer(self, form: str, what: str) -> int:
        """Return the next number, in struct's notation."""
        (number,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        return int(number)

    def count(self, form: str, smallest: int, what: str) -> int:
        """Return the next number, a count: as many items of ``smallest`` bytes or more must still follow."""
        number = self.integer(form, what)
        if number * smallest > min(self.size, MAX_HEADER_BYTES) - self.position:
            raise FormatError(f"{what} is {number}, and it has only {self.size} bytes")
        return number

    def string(self, what: str) -> str:
        """Return the next string, which has its length before it."""
        length = self.count("<Q", 1, f"the length of {what}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{what} is not valid UTF-8: {error}") from error

    def value(self, what: str) -> Any:
        """Return the next value of the metadata, which has its type before it."""
        number = self.integer("<I", what)
        if number == _STRING:
            return self.string(what)
        if number == _ARRAY:
            return self._array(what)
        return self._scalars(number, 1, what)[0]

    def _array(self, what: str) -> list[Any]:
        number = self.integer("<I", what)
        if number == _STRING:
            return self._strings(self.count("<Q", _LENGTH.size, f"the length of {what}"), what)
        width = struct.calcsize(_SCALARS[number]) if number in _SCALARS else 1
        return self._scalars(number, self.count("<Q", width, f"the length of {what}"), what)

    def _scalars(self, number: int, count: int, what: str) -> list[Any]:
        if number not in _SCALARS:
            raise FormatError(f"{what} has the unknown type {number}")
        form = f"<{count}{_SCALARS[number]}"
        values = list(struct.unpack(form, self.take(struct.calcsize(form), what)))
        if number != _BOOL:
            return values
        if not set(values) <= {0, 1}:
            raise FormatError(f"{what} is {shown(max(values))}, which is neither true nor false")
        return list(map(bool, values))

    def _strings(self, count: int, what: str) -> list[str]:
        """Return strings; a vocabulary has hundreds of thousands, so this loop does little."""
        memory, limit, position = self._memory, min(self.size, MAX_HEADER_BYTES), self.position
        strings = []
        try:
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(memory, position)
                position += _LENGTH.size + length
                if position > limit:
                    break
                strings.append(memory[position - length : position].decode())
        except struct.error:
            position = limit + 1
        except UnicodeDecodeError as error:
            raise FormatError(f"string {len(strings)} of {what} is not valid UTF-8: {error}") from error
        if position > limit:
            raise FormatError(f"it has {self.size} bytes, so it is cut off in string {len(strings)} of {what}")
        self.position = position
        return strings
