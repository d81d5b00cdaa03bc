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
from deployments.parsers.schema_types import Schema, SchemaPart

__all__ = ["argument_types", "as_json", "encode", "literal_value", "string_piece"]

_TYPE_OF = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NAMES = {"true": True, "false": False, "null": None}


def argument_types(parameters: Schema, key: str) -> set[str]:
    """Return the types that a tool's ``parameters`` allow for an argument, as ``SchemaPart.types`` does."""
    return SchemaPart.of(parameters).property(key).types


def string_piece(text: str) -> CallArguments:
    """Return a piece of a string, as JSON escapes it."""
    return CallArguments(encode_basestring(text)[1:-1])


def as_json(text: str, types: set[str], *, allows_python: bool = False) -> str:
    """Return the JSON that ``text`` stands for: itself, if it is JSON of one of ``types``, else a string.

    Args:
        text: the value.
        types: as ``argument_types`` returns them.
        allows_python: whether a list or an object may also be written as in Python.
    """
    stripped = text.strip()
    valid = valid_json(_WORDS.get(stripped, stripped))
    if valid is None and allows_python and stripped[:1] in tuple("[{") and "string" not in types:
        valid = _python_as_json(stripped)
    if valid is None:
        return encode_basestring(text)
    kind = _TYPE_OF.get(valid[0], "number")
    fits = kind in types or (kind == "number" and "integer" in types and float(valid).is_integer())
    return encode_basestring(text) if "string" in types and not fits else valid


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
