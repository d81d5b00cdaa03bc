"""How fast a machine reads weights and multiplies with them, as measured by linear_rates.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.limits.model_shape import WEIGHT_BYTES

__all__ = ["Rates"]


@dataclass(frozen=True)
class Rates:
    """How fast a machine computes packed bf16 linears.

    Attributes:
        weights_gb_s: gigabytes of weights read per second with one row.
        gflop_s: by number of rows; interpolated linearly between them, constant beyond them.
    """

    weights_gb_s: float
    gflop_s: dict[int, float]

    @classmethod
    def from_json(cls, rates: dict[str, Any]) -> Rates:
        """Return the rates from the JSON of ``dataclasses.asdict``, whose keys are strings."""
        return cls(rates["weights_gb_s"], {int(rows): rate for rows, rate in rates["gflop_s"].items()})

    def gflop_s_at(self, rows: int) -> float:
        """Return the rate at this number of rows."""
        known = sorted(self.gflop_s)
        if rows <= known[0] or rows >= known[-1]:
            return self.gflop_s[known[0] if rows <= known[0] else known[-1]]
        upper = next(index for index, size in enumerate(known) if size >= rows)
        low, high = known[upper - 1], known[upper]
        share = (rows - low) / (high - low)
        return self.gflop_s[low] + share * (self.gflop_s[high] - self.gflop_s[low])

    def linear_seconds(self, parameters: int, rows: int) -> float:
        """Return the least time of linears with this number of parameters: the longer of reading and computing."""
        reading = parameters * WEIGHT_BYTES / (self.weights_gb_s * 1e9)
        computing = 2 * parameters * rows / (self.gflop_s_at(rows) * 1e9)
        return max(reading, computing)
