"""Argument values that a format writes as text; the tool's schema decides which JSON they stand for."""

from __future__ import annotations

import ast
import json
import warnings
from json.encoder import encode_basestring
from typing import Any

from deployments.parsers.events import CallArguments
from deployments.parsers.json_scanner import valid_json
from deployments.parsers.reader import MalformedError
from deployments.parsers.schema_types import Allowed, Schema, SchemaPart

__all__ = ["allowed_argument", "as_json", "encode", "literal_value", "string_piece"]

_TYPE_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NAMES = {"true": True, "false": False, "null": None}


def allowed_argument(parameters: Schema, key: str) -> Allowed:
    """Return what a tool's ``parameters`` allow for an argument."""
    return SchemaPart.of(parameters).property(key).allowed


def string_piece(text: str) -> CallArguments:
    """Return a piece of a string, as JSON escapes it."""
    return CallArguments(encode_basestring(text)[1:-1])


def as_json(text: str, allowed: Allowed, *, allows_python: bool = False) -> str:
    """Return the JSON that ``text`` stands for: itself, if it is JSON of an allowed type, else a string.

    A text that is JSON and one of the listed strings is that string, unless its value is listed, too.

    Args:
        text: the value.
        allows_python: whether a list or an object may also be written as in Python.
    """
    stripped, types = text.strip(), allowed.types
    valid = valid_json(_WORDS.get(stripped, stripped))
    if valid is None and allows_python and stripped[:1] in tuple("[{") and "string" not in types:
        valid = _python_as_json(stripped)
    if valid is None:
        return encode_basestring(text)
    if stripped in [value for value in allowed.listed if isinstance(value, str)] and not _is_listed(valid, allowed):
        return encode_basestring(stripped)
    kind = _TYPE_OF.get(valid[0], "number")
    fits = kind in types or (kind == "number" and "integer" in types and float(valid).is_integer())
    return encode_basestring(text) if "string" in types and not fits else valid


def _is_listed(text: str, allowed: Allowed) -> bool:
    """Whether a JSON text is one of the listed values; 1 is 1.0, and not true."""
    value = json.loads(text)
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed.listed)


def encode(value: Any) -> str:
    """Return a value as JSON text that can be sent: an unpaired surrogate is escaped.

    Raises:
        ValueError: it is not a JSON value.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace").decode()


def literal_value(node: ast.expr) -> Any:
    """Return the JSON value of a Python literal; ``true``, ``false`` and ``null`` are literals, too.

    Raises:
        MalformedError: it is another expression.
    """
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): literal_value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        if isinstance(number, int | float):
            return -number
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedError


def _python_as_json(text: str) -> str | None:
    """Return a Python literal as JSON; None if it is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            return encode(literal_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, MalformedError):
        return None
