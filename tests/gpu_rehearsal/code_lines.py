"""Which line of the product (or of a test) is running."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "caller_line"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_PARTS = tuple(f"{ROOT / name}/" for name in ("engine", "kernels", "deployments", "benchmarks", "tests"))


def caller_line(depth: int = 3) -> str:
    """Return the innermost lines of ours that are running, as "file:line in function", each followed by its caller."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < depth:
        file = frame.f_code.co_filename
        if file.startswith(_PARTS) and not _is_simulator(file):
            lines.append(f"{file[len(str(ROOT)) + 1 :]}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " <- ".join(lines) or "unknown line"


@cache
def _is_simulator(file: str) -> bool:
    path = Path(file)
    return path.parent == HERE and not path.name.startswith("test_")
