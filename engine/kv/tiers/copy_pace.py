"""CopyPace: how many bytes the next step may copy to host memory for a disk, so that it hardly takes longer."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["CopyPace"]

_SHARE: Final = 0.02  # of a step's time
_BYTES_PER_S: Final = 2e9  # what any machine copies
_MOST: Final = 64 * 2**20
_NUM_STEPS: Final = 4


class CopyPace:
    """A share of the shortest of the last few steps that have computed something: the next one may be as short.

    One block is always copied, whatever it takes.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)

    def step_finished(self, seconds: float) -> None:
        """Record how long a step took that has computed something."""
        self._seconds.append(seconds)

    def max_bytes(self) -> int:
        """Return the bytes to copy; before the first step there is no limit but memory's."""
        shortest = min(self._seconds, default=float("inf"))
        return int(min(_MOST, _SHARE * _BYTES_PER_S * shortest))
