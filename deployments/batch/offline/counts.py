"""Counts: how far a batch without a server is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass
class Counts:
    """How far a run is."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Lines with a result."""
        return self.completed + self.failed
