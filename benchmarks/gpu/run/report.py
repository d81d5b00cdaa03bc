"""The run's document, and the short table that is printed last."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.run.runner import PartOutcome

__all__ = ["summary", "to_document"]

WIDTH = 100


def to_document(outcomes: dict[str, PartOutcome], *, seconds: float, complete: bool) -> dict[str, Any]:
    """Return what the JSON holds.

    Args:
        seconds: since the start.
        complete: whether every part has had its turn.
    """
    return {
        "passed": complete and all(outcome.status == "passed" for outcome in outcomes.values()),
        "complete": complete,
        "seconds": round(seconds, 1),
        "parts": {name: outcome.to_json() for name, outcome in outcomes.items()},
    }


def summary(outcomes: dict[str, PartOutcome]) -> str:
    """Return one line for each part, and below it those that its figures' ``summary`` lists."""
    lines = []
    for name, outcome in outcomes.items():
        fault = outcome.faults[0] if outcome.faults else ""
        lines.append(f"{name:22} {outcome.status:8} {outcome.seconds:6.1f} s  {fault}"[:WIDTH])
        lines += [f"    {line}"[:WIDTH] for line in outcome.figures.get("summary", [])]
    return "\n".join(lines)
