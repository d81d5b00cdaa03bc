"""TransferLog: what one replica has read from others in the last minute, and what it reads now, for the web page."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from deployments.transport.pages.pull import Pulled

__all__ = ["Transfer", "TransferLog"]

_KEPT_S: Final = 60.0
_MOST: Final = 50  # that are kept: the latest


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages that a replica has read, or reads, from another one. It pickles.

    Attributes:
        endpoint: where the other one serves its pages.
        time: when it began, in Unix seconds.
        seconds: that it took, or has taken so far.
        tokens: whose KV has come.
        bytes: of their pages.
        is_running: whether it goes on.
    """

    endpoint: str
    time: float
    seconds: float
    tokens: int
    bytes: int
    is_running: bool


@dataclass(eq=False, slots=True)
class _Entry:
    endpoint: str
    pulled: Pulled
    time: float
    started: float
    ended: float | None = None


class TransferLog:
    """The transfers of one client. Any thread may call it.

    Args:
        block_size: tokens per block.
        clock: Unix seconds.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.time) -> None:
        self._block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque(maxlen=_MOST)

    def began(self, endpoint: str, pulled: Pulled) -> Callable[[], None]:
        """Record that a transfer begins, which fills ``pulled``; return what is called when it has ended."""
        entry = _Entry(endpoint, pulled, self._clock(), monotonic())
        with self._lock:
            self._entries.append(entry)

        def ended() -> None:
            entry.ended = monotonic()

        return ended

    def recent(self) -> tuple[Transfer, ...]:
        """Return the transfers that run, and those of the last minute that have brought something; oldest first."""
        now = monotonic()
        with self._lock:
            while self._entries and (ended := self._entries[0].ended) is not None and ended < now - _KEPT_S:
                self._entries.popleft()
            entries = list(self._entries)
        return tuple(self._transfer(entry, now) for entry in entries if entry.ended is None or entry.pulled.num_blocks)

    def _transfer(self, entry: _Entry, now: float) -> Transfer:
        ended, pulled = entry.ended, entry.pulled
        return Transfer(
            entry.endpoint,
            entry.time,
            (now if ended is None else ended) - entry.started,
            pulled.num_blocks * self._block_size,
            pulled.num_bytes,
            ended is None,
        )
