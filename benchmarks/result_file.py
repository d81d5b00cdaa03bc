"""The JSON files of results: a record is on one line, so that files are short and a diff names records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_result"]

_WIDTH = 120


def write_result(path: Path, document: Any) -> None:
    """Write a document to a file."""
    path.write_text(_lines(document, indent="") + "\n", encoding="utf-8")


def _lines(value: Any, indent: str) -> str:
    """Return a value as JSON, on one line if it fits or contains no other object or list."""
    parts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else []
    text = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(text) <= _WIDTH or not any(isinstance(part, Mapping | list | tuple) for part in parts):
        return text
    keys = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, Mapping) else [""] * len(parts)
    inner = indent + " "
    lines = ",\n".join(inner + key + _lines(part, inner) for key, part in zip(keys, parts, strict=True))
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    return f"{opening}\n{lines}\n{indent}{closing}"
