"""read_json: the JSON object of a file, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

__all__ = ["read_json"]


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        OSError: if it cannot be read.
        ModelLoadError: if it holds something else.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"'{file}' is not valid JSON: {error}; download it again") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"'{file}' holds a {type(raw).__name__}; a JSON object is expected; download it again")
    return raw
