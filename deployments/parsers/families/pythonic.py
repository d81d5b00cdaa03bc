"""Pythonic calls, as of Llama 3.2 and 4: an answer that is a list ``[name(key=value), ...]``.

A call is emitted once it is complete, since its Python values have to become JSON.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Container
from typing import Any

from deployments.parsers.events import CallArguments, CallStart, Content, Steps
from deployments.parsers.json_calls import attempt, checked_name
from deployments.parsers.reader import MalformedError, Reader

__all__ = ["MARKERS", "pythonic"]

MARKERS = ("<|python_start|>", "<|python_end|>")
_MAX_NAME = 256
_MAX_CALL = 2**16  # characters of a call's arguments
_NAMES = {"true": True, "false": False, "null": None}


def pythonic(reader: Reader, tools: Container[str]) -> Steps[None]:
    """Read a list of calls of ``tools`` at the start or after a marker, and text."""
    start, end = MARKERS
    if (yield from attempt(reader, _list(reader, tools))):
        yield from reader.literal(end)
    while (yield from reader.until([start], Content)) is not None:
        if (yield from attempt(reader, _list(reader, tools))):
            yield from reader.literal(end)
        else:
            yield Content(start)


def _list(reader: Reader, tools: Container[str]) -> Steps[None]:
    yield from reader.expect("[")
    while True:
        if not (yield from attempt(reader, _call(reader, tools))):
            raise MalformedError
        if (yield from reader.skip_space()) == "]":
            yield from reader.expect("]")
            return
        yield from reader.expect(",")


def _call(reader: Reader, tools: Container[str]) -> Steps[None]:
    yield from reader.skip_space()
    name, _ = yield from reader.take_until(["("], limit=_MAX_NAME, never="\n\"'[]{},")
    checked_name(name, tools)
    brackets, text = _Brackets(), ""
    while True:
        piece, _ = yield from reader.take_until([")"], limit=_MAX_CALL - len(text))
        brackets.add(piece)
        text += piece
        if brackets.is_closed:
            break
        brackets.add(")")
        text += ")"
    arguments = _as_json(text)
    yield CallStart(name)
    yield CallArguments(arguments)


class _Brackets:
    """Whether all brackets and strings of a text in pieces are closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def add(self, text: str) -> None:
        for character in text:
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            else:
                self._depth += (character in "([{") - (character in ")]}")

    @property
    def is_closed(self) -> bool:
        return not self._quote and self._depth <= 0


def _as_json(text: str) -> str:
    """Return the keyword arguments in ``text`` as a JSON object.

    Raises:
        MalformedError: it holds anything else than keyword arguments that are literals.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise MalformedError
        if len({keyword.arg for keyword in call.keywords}) < len(call.keywords):
            raise MalformedError
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        encoded = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise MalformedError from None
    return encoded.encode(errors="backslashreplace").decode()  # an unpaired surrogate, as JSON escapes it


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        if isinstance(number, int | float):
            return -number
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedError
