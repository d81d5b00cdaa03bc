"""Pythonic calls: ``[name(key=value), ...]``, the whole answer (Llama 3.2 and 4) or after a marker (LFM2, OLMo 3).

A call is emitted once it is complete, since its Python values have to become JSON.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Container

from deployments.parsers.events import CallArguments, CallStart, Content, Steps
from deployments.parsers.json_calls import attempt, calls, checked_name
from deployments.parsers.reader import MalformedError, Reader
from deployments.parsers.schema_types import Tools
from deployments.parsers.typed_values import encode, literal_value

__all__ = ["LFM2_CALLS", "LFM2_MARKERS", "OLMO3_CALLS", "OLMO3_MARKERS", "PYTHONIC_MARKERS", "pythonic"]

PYTHONIC_MARKERS = ("<|python_start|>", "<|python_end|>")
LFM2_MARKERS = ("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3_MARKERS = ("<function_calls>", "</function_calls>")
_MAX_NAME = 256
_MAX_CALL = 2**16  # characters of a call's arguments
_STRING = re.compile(r"""(?<![\w'"])(['"])""")  # where a string starts
# What follows the quote that ends a string, rather than one inside it.
_AFTER_STRING = re.compile(
    r"""\s*(?:[)\]}:]|,\s*(?:[A-Za-z_]\w*\s*=|['"\[{(\d-]|(?:True|False|None|true|false|null)\b))"""
)


def pythonic(reader: Reader, tools: Container[str]) -> Steps[None]:
    """Read a list of calls of ``tools`` at the start or after a marker, and text."""
    start, end = PYTHONIC_MARKERS
    if (yield from attempt(reader, _list(reader, tools))):
        yield from reader.literal(end)
    while (yield from reader.until([start], Content)) is not None:
        if (yield from attempt(reader, _list(reader, tools))):
            yield from reader.literal(end)
        else:
            yield Content(start)


def _lfm2(reader: Reader, tools: Tools) -> Steps[None]:
    """Read the list after LFM2's marker, and its end; it may also be JSON."""
    end = LFM2_MARKERS[1]
    if not (yield from attempt(reader, calls(reader))):
        text, _ = yield from reader.take_until([end], limit=_MAX_CALL)
        yield from _emitted(text.strip().removeprefix("[").removesuffix("]"))
        return
    yield from reader.skip_space()
    yield from reader.literal(end)


def _olmo3(reader: Reader, tools: Tools) -> Steps[None]:
    """Read the calls after OLMo 3's marker, one a line, and their end."""
    text, _ = yield from reader.take_until(OLMO3_MARKERS[1:], limit=_MAX_CALL)
    yield from _emitted(text)


LFM2_CALLS = {LFM2_MARKERS[0]: _lfm2}
OLMO3_CALLS = {OLMO3_MARKERS[0]: _olmo3}


def _emitted(text: str) -> Steps[None]:
    """Emit the calls in ``text``, which commas or line breaks separate.

    Raises:
        MalformedError: it holds anything else.
    """
    parsed = _parsed_calls(text)
    if parsed is None and (parsed := _parsed_calls(_requoted(text))) is None:
        raise MalformedError
    for call in parsed:
        yield CallStart(call[0])
        yield CallArguments(call[1])


def _parsed_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the names and the arguments of calls; None if there are none, or the text holds anything else."""
    nodes: list[ast.expr] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            for statement in ast.parse(text.strip()).body:
                value = getattr(statement, "value", None)
                nodes += value.elts if isinstance(value, ast.Tuple) else [value] if isinstance(value, ast.expr) else []
        return [(checked_name(_name(node)), _arguments_of(node)) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, MalformedError):
        return None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        return ast.unparse(node.func)
    raise MalformedError


def _requoted(text: str) -> str:
    """Return calls with the quotes and line breaks in their strings escaped: templates write strings as they are."""
    pieces, position = [], 0
    while (start := _STRING.search(text, position)) is not None:
        quote, end = start[1], start.end()
        while (end := text.find(quote, end)) >= 0 and not _AFTER_STRING.match(text, end + 1):
            end += 1
        if end < 0:
            break
        inner = text[start.end() : end].replace("\n", "\\n").replace("\r", "\\r")
        inner = re.sub(rf"(?<!\\)((?:\\\\)*){quote}", rf"\1\\{quote}", inner)
        pieces.append(f"{text[position : start.start()]}{quote}{inner}{quote}")
        position = end + 1
    return "".join(pieces) + text[position:]


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
            return _arguments_of(ast.parse(f"f({text}\n)", mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise MalformedError from None


def _arguments_of(call: ast.expr) -> str:
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise MalformedError
    if len({keyword.arg for keyword in call.keywords}) < len(call.keywords):
        raise MalformedError
    return encode({keyword.arg: literal_value(keyword.value) for keyword in call.keywords})
