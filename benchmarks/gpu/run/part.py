"""Part: one check or measurement of the run, and PartResults: what it has found so far, kept in a file.

A part runs in a process of its own (part_process.py), which a fault may end at any moment. So each figure is written
when it is known, and the file says whether the part came to its end. This module imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Part", "PartResults", "read_results", "write_json"]


@dataclass(frozen=True)
class Part:
    """One check or measurement.

    Attributes:
        name: key in the JSON.
        target: ``module:function``; the function takes a PartRun.
        expected_s: seconds that it takes on an H200; it is not started when less time is left.
        limit_s: seconds after which it is killed.
        needs: names of parts that must have passed before.
        arguments: keyword arguments of the function; JSON.
    """

    name: str
    target: str
    expected_s: float
    limit_s: float
    needs: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


class PartResults:
    """Figures and faults of a running part; every change is written to ``path`` at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = {}
        self._faults: list[str] = []
        self._write(complete=False)

    def record(self, name: str, figures: Any) -> None:
        """Set one entry of the part's figures.

        Raises:
            ValueError: if a figure is NaN or infinite, which JSON cannot hold.
        """
        json.dumps(figures, allow_nan=False)
        self._figures[name] = figures
        self._write(complete=False)

    def fault(self, reason: str) -> None:
        """Make the part fail; it may go on to find more."""
        self._faults.append(reason)
        self._write(complete=False)

    def finish(self) -> None:
        """Mark the part as complete. It has passed if it has no fault."""
        self._write(complete=True)

    def _write(self, *, complete: bool) -> None:
        write_json(self._path, {"complete": complete, "faults": self._faults, "figures": self._figures})


def read_results(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a part's figures and its faults; a file that is missing, incomplete or garbage is a fault too."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_reject_constant)
        complete, faults, figures = document["complete"], document["faults"], document["figures"]
        if not (isinstance(complete, bool) and isinstance(faults, list) and isinstance(figures, dict)):
            raise TypeError("its entries have the wrong types")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, [f"its results cannot be read: {type(error).__name__}: {error}"]
    return figures, [*map(str, faults), *([] if complete else ["it did not come to its end"])]


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a figure")


def write_json(path: Path, document: Any) -> None:
    """Write a file in one step: a reader sees the old document or the new one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)
