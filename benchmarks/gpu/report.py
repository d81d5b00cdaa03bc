"""The run's document, and the short table that is printed last."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.runner import PartOutcome

__all__ = ["summary", "to_document"]

WIDTH = 100


def to_document(outcomes: dict[str, PartOutcome], *, seconds: float, complete: bool) -> dict[str, Any]:
    """Return what the JSON holds.

    Args:
        seconds: since the start.
        complete: whether every part has had its turn.
    """
    return {
        "passed": complete and all(one.status == "passed" for one in outcomes.values()),
        "complete": complete,
        "seconds": round(seconds, 1),
        "parts": {name: one.to_json() for name, one in outcomes.items()},
    }


def summary(outcomes: dict[str, PartOutcome]) -> str:
    """Return one line for each part, and below it those that its figures' ``summary`` lists."""
    lines = []
    for name, one in outcomes.items():
        lines.append(f"{name:22} {one.status:8} {one.seconds:6.1f} s  {one.faults[0] if one.faults else ''}"[:WIDTH])
        lines += [f"    {line}"[:WIDTH] for line in one.figures.get("summary", [])]
    return "\n".join(lines)
