"""ClientTurns: the waiting requests of several clients start in turns, one of each after the other.

A burst of one client does not make the others wait for its end. The requests of one client start in the order of their
arrival. Requests of the same turn start in order of arrival, so no client starves.
"""

from __future__ import annotations

from engine.sequence import SequenceGroup

__all__ = ["ClientTurns"]


class ClientTurns:
    """Numbers the turns from 1. A request gets its turn when it is queued first, and keeps it when it is preempted."""

    def __init__(self) -> None:
        self._now = 0  # the latest turn in which a request has started
        self._clients: dict[str, tuple[int, int]] = {}  # with waiting requests: how many, and the latest turn of them

    def join(self, group: SequenceGroup) -> None:
        """Take a request into the queue."""
        count, last = self._clients.get(group.request.client, (0, 0))
        if not group.turn:
            group.turn = max(self._now, last) + 1
        self._clients[group.request.client] = (count + 1, max(last, group.turn))

    def leave(self, group: SequenceGroup, *, starts: bool) -> None:
        """Take a request out of the queue: it starts, or has ended."""
        if starts:
            self._now = max(self._now, group.turn)
        count, last = self._clients.pop(group.request.client)
        if count > 1:
            self._clients[group.request.client] = (count - 1, last)
