"""JsonScanner: finds the end of a JSON value in text that arrives in pieces, and its first error.

It reads characters, so the result does not depend on how the text is cut. It builds no values.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring

__all__ = ["GrowingJson", "JsonScanner", "valid_json"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # the part of a string that needs no attention
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_WORDS = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_SPACE = " \n\t\r"
_HEX = "0123456789abcdefABCDEF"
_MAX_DEPTH = 64


def valid_json(text: str) -> str | None:
    """Return ``text`` if it is JSON, with control characters in its strings escaped, else None.

    Unlike json.loads, it rejects NaN and infinities.
    """
    scanner = JsonScanner()
    scanned, end = scanner.scan(f"{text} ", 0)  # a number ends with the character after it
    return scanned if scanner.is_done and not text[end:].strip(_SPACE) else None


class JsonScanner:
    """Scans one value.

    Attributes:
        is_done: the value has ended.
        has_failed: the next character cannot continue the value.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []  # the closing brackets that are to come
        self._state = "value"
        self._word = ""
        self._digits = 0  # of a \\u escape, still to come
        self.is_done = False
        self.has_failed = False

    def scan(self, text: str, position: int) -> tuple[str, int]:
        """Read ``text`` from ``position`` on; returns what was valid, and the position after it.

        Control characters in strings, which JSON does not allow, are returned as escapes.
        """
        pieces: list[str] = []
        while position < len(text) and not self.is_done:
            piece, end = self._step(text, position)
            if self.has_failed or (self.is_done and end == position):
                break
            pieces.append(piece)
            position = end
        return "".join(pieces), position

    def _step(self, text: str, position: int) -> tuple[str, int]:
        """Read one character, or several that need no attention; returns them as JSON, and their end."""
        character, end = text[position], position + 1
        if self._state in ("string", "key string"):
            if plain := _PLAIN.match(text, position):
                return plain[0], plain.end()
            return self._string(character), end
        if self._state in ("escape", "key escape"):
            self._escape(character)
        elif self._state == "word":
            if word := _WORD.match(text, position):
                self._word += word[0]
                return word[0], word.end()
            self._end_word()
            return "", position
        elif character not in _SPACE:
            self._structure(character)
        if self._state == "word":  # it starts here
            return "", position
        return character, end

    def _string(self, character: str) -> str:
        if character == '"':
            is_key = self._state == "key string"
            self._state = "colon" if is_key else self._after_value()
        elif character == "\\":
            self._state = self._state.replace("string", "escape")
        else:
            return encode_basestring(character)[1:-1]
        return character

    def _escape(self, character: str) -> None:
        """Read the characters after a backslash."""
        if self._digits:
            self.has_failed = character not in _HEX
            self._digits -= 1
        elif character == "u":
            self._digits = 4
        else:
            self.has_failed = character not in '"\\/bfnrt'
        if not self._digits:
            self._state = self._state.replace("escape", "string")

    def _structure(self, character: str) -> None:
        """Read a character between strings and words."""
        state = self._state
        if state == "colon" and character == ":":
            self._state = "value"
        elif state in ("key", "key or end") and character == '"':
            self._state = "key string"
        elif state in ("after", "key or end", "value or end") and self._stack and character == self._stack[-1]:
            self._stack.pop()
            self._state = self._after_value()
        elif state == "after" and character == ",":
            self._state = "key" if self._stack[-1] == "}" else "value"
        elif state in ("value", "value or end"):
            self._start_value(character)
        else:
            self.has_failed = True

    def _start_value(self, character: str) -> None:
        if character in "{[" and len(self._stack) < _MAX_DEPTH:
            self._stack.append("}" if character == "{" else "]")
            self._state = "key or end" if character == "{" else "value or end"
        elif character == '"':
            self._state = "string"
        elif character in "-0123456789tfn":
            self._state, self._word = "word", ""
        else:
            self.has_failed = True

    def _end_word(self) -> None:
        self.has_failed = _WORDS.fullmatch(self._word) is None
        self._state = self._after_value()

    def _after_value(self) -> str:
        self.is_done = not self._stack and not self.has_failed
        return "after"


class GrowingJson:
    """Whether a text that grows is JSON yet, in time that is linear in the whole text.

    A piece may not begin within a word, such as a number.
    """

    def __init__(self) -> None:
        self._scanner: JsonScanner | None = JsonScanner()  # None: more text does not make it JSON

    def extend(self, piece: str) -> bool:
        """Append a piece; returns whether the text is JSON now, whitespace around it aside."""
        scanner = self._scanner
        if scanner is None:
            return False
        piece = f"{piece.rstrip()} "  # a number ends with the character after it
        _, end = scanner.scan(piece, 0)
        if scanner.is_done or scanner.has_failed:
            self._scanner = None
        return scanner.is_done and not piece[end:].strip(_SPACE)
