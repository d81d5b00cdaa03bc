"""StallWatch: bounds the time that requests wait for a replica's next output, and interrupts long waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deployments.errors import ReplicaStalledError, RequestTimeoutError
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.stream import ReplicaStream

__all__ = ["StallWatch"]

MAX_INTERVAL_S = 0.25
CHECKS_PER_TIMEOUT = 8
NUDGE_S = 1.0  # a client that has gone is noticed after two nudges; see deployments/proxy/backends.py
MAX_NUDGES_PER_S = 1000  # each takes some 50 microseconds


@dataclass(slots=True)
class _Watched:
    """A stream, and the wait that was seen last."""

    deadline: float
    wait: int | None = None
    stalls_at: float = 0.0  # when that wait becomes a stall
    nudge_at: float = 0.0


class StallWatch:
    """Fails the streams whose replica has stalled, and those whose request has reached its deadline.

    It nudges the readers of the others about once a second, less often if there are thousands, for what they may have
    to do meanwhile.

    One timer serves all streams: it looks at each a few times within the timeout. The time between two waits, in which
    the client reads, does not count.

    Args:
        view: knows whether a replica has a queue that explains a long wait.
        stall_timeout_s: seconds without an output after which a replica counts as stalled.
    """

    def __init__(self, view: ClusterView, *, stall_timeout_s: float) -> None:
        self._view = view
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, stall_timeout_s / CHECKS_PER_TIMEOUT)
        self._watched: dict[ReplicaStream, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: ReplicaStream, deadline: float) -> None:
        """Watch a stream until ``remove``.

        A wait ends with ReplicaStalledError if nothing arrives within the stall timeout and no queue explains it, and
        with RequestTimeoutError at the deadline.

        Args:
            stream: fails with one of these errors.
            deadline: when the request times out, on the event loop's clock.
        """
        self._watched[stream] = _Watched(deadline)
        if self._timer is None:
            self._set_timer()

    def remove(self, stream: ReplicaStream) -> None:
        """Stop watching a stream."""
        self._watched.pop(stream, None)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def _check(self) -> None:
        """Judge every wait in progress."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        nudge_s = max(NUDGE_S, len(self._watched) / MAX_NUDGES_PER_S)
        for stream, watched in list(self._watched.items()):
            wait = stream.wait_in_progress
            if wait is None:
                continue
            if wait is not watched.wait:
                watched.wait, watched.stalls_at = wait, now + self._stall_timeout_s
                watched.nudge_at = now + nudge_s
            if (verdict := self._judge(stream, watched, now)) is not None:
                stream.fail(verdict)
            elif now >= watched.nudge_at:
                watched.nudge_at = now + nudge_s
                stream.nudge()
        if self._watched:
            self._set_timer()

    def _judge(self, stream: ReplicaStream, watched: _Watched, now: float) -> Exception | None:
        """Return why a wait must end, if it must."""
        if now >= watched.deadline:
            return RequestTimeoutError("the request took longer than this server allows")
        if now < watched.stalls_at:
            return None
        if allowance := self._view.stall_allowance(stream.request_id, self._stall_timeout_s):
            watched.stalls_at = now + allowance
            return None
        return ReplicaStalledError(self._view.replica_of(stream.request_id), self._stall_timeout_s)
