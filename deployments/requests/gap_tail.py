"""GapTail: the 99th percentile of the times between the tokens of a replica's answers, followed as it changes."""

from __future__ import annotations

__all__ = ["GapTail"]

_SHARE = 0.01  # of the gaps are longer
_STEP = 0.03  # relative; a single pause of the machine changes nothing
_MIN_GAPS = 500  # before which it is not known
_LEAST_S = 1e-5


class GapTail:
    """Follows the percentile by a small step for each gap, up or down (Robbins and Monro, 1951).

    At the percentile the steps cancel out: one gap in 100 is longer, and raises it 99 times as much as others lower it.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_gaps = 0

    @property
    def seconds(self) -> float:
        """The percentile in seconds; 0 if it is not known yet."""
        return self._seconds if self._num_gaps >= _MIN_GAPS else 0.0

    def add(self, seconds: float) -> None:
        """Take in a gap."""
        self._num_gaps += 1
        if self._num_gaps == 1:
            self._seconds = max(seconds, _LEAST_S)
        elif seconds > self._seconds:
            self._seconds *= 1 + _STEP * (1 - _SHARE)
        else:
            self._seconds = max(self._seconds * (1 - _STEP * _SHARE), _LEAST_S)
