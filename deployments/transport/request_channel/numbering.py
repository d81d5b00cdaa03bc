"""Outbox and Arrivals: numbered messages in one direction, none lost and none twice, over connections that break.

    Outbox     numbers messages from 1 and keeps each until the peer has acknowledged it
    Arrivals   takes messages in the order of their numbers, and shows gaps

An acknowledgement covers all messages up to its number. After a gap the receiver asks for everything after the last
number that it has. Knows neither sockets nor clocks nor what a message is; each object belongs to one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

__all__ = ["Arrivals", "Outbox"]

MAX_STALLED_REPORTS = 4  # messages that were sent and have not arrived after this many reports are lost


class Outbox:
    """The messages to one peer that it has not acknowledged.

    Attributes:
        last_number: of the last message that was added; 0 before the first.
        num_bytes: of the messages that are kept.
    """

    def __init__(self) -> None:
        self.last_number = 0
        self.num_bytes = 0
        self._kept: deque[bytes] = deque()  # consecutive; the last one has ``last_number``

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def acknowledged(self) -> int:
        """Number of the last message that the peer has acknowledged."""
        return self.last_number - len(self._kept)

    def add(self, data: bytes) -> None:
        """Keep the message with the next number."""
        self.last_number += 1
        self.num_bytes += len(data)
        self._kept.append(data)

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to ``number``; a number from the future is ignored."""
        if number > self.last_number:
            return
        for _ in range(number - self.acknowledged):
            self.num_bytes -= len(self._kept.popleft())

    def after(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Return the kept messages after ``number``, with their numbers, the oldest first."""
        skipped = max(0, number - self.acknowledged)
        return enumerate(islice(self._kept, skipped, None), start=self.acknowledged + skipped + 1)

    def clear(self) -> None:
        """Drop everything; the peer is lost."""
        self._kept.clear()
        self.num_bytes = 0


class Arrivals:
    """Which messages of one peer have arrived.

    Attributes:
        received: number of the last message that has arrived with all before it.
        has_gap: a later message has arrived, and the missing ones have not yet.
    """

    def __init__(self) -> None:
        self.received = 0
        self.has_gap = False
        self._received_at_last_report = self._num_stalled_reports = 0

    def accept(self, number: int) -> bool:
        """Return whether to process the message with this number: it is the next one."""
        if number == self.received + 1:
            self.received = number
            self.has_gap = False
            return True
        if number > self.received:
            self.has_gap = True
        return False

    def has_lost_tail(self, sent: int) -> bool:
        """Return whether the last messages are lost, which no later message can show.

        Args:
            sent: number of the last message that the peer has sent, as it reports periodically.
        """
        is_stalled = self.received < sent and self.received == self._received_at_last_report
        self._received_at_last_report = self.received
        self._num_stalled_reports = self._num_stalled_reports + 1 if is_stalled else 0
        if self._num_stalled_reports < MAX_STALLED_REPORTS:
            return False
        self._num_stalled_reports = 0
        return True
