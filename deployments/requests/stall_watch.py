"""StallWatch: bounds the time that requests wait for a replica's next output, and interrupts long waits."""

from __future__ import annotations

import asyncio

from deployments.errors import ReplicaStalledError, RequestTimeoutError
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.dispatch import Dispatch

__all__ = ["StallWatch"]

MAX_INTERVAL_S = 0.25
CHECKS_PER_TIMEOUT = 8
WAKE_S = 1.0  # a client that has gone is noticed after two wakes; see deployments/proxy/backends.py
MAX_WAKES_PER_S = 1000  # each takes some 50 microseconds


class StallWatch:
    """Fails the dispatches whose replica has stalled, and those whose request has reached its deadline.

    It wakes the readers of the others about once a second, less often if there are thousands, for what they may have
    to do meanwhile.

    One timer serves all: it checks each wait a few times within the timeout. The time between two waits, in which the
    client reads, does not count.

    Args:
        view: knows whether a replica has a queue that explains a long wait.
        stall_timeout_s: seconds without an output after which a replica counts as stalled.
    """

    def __init__(self, view: ClusterView, *, stall_timeout_s: float) -> None:
        self._view = view
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, stall_timeout_s / CHECKS_PER_TIMEOUT)
        self._watched: set[Dispatch] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, dispatch: Dispatch) -> None:
        """Watch a dispatch until ``remove``.

        A wait ends with ReplicaStalledError if nothing arrives within the stall timeout and no queue explains it, and
        with RequestTimeoutError at the deadline.
        """
        self._watched.add(dispatch)
        if self._timer is None:
            self._set_timer()

    def remove(self, dispatch: Dispatch) -> None:
        """Stop watching a dispatch."""
        self._watched.discard(dispatch)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def _check(self) -> None:
        """Check every wait in progress."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        wake_s = max(WAKE_S, len(self._watched) / MAX_WAKES_PER_S)
        for dispatch in list(self._watched):
            wait = dispatch.wait_in_progress
            if wait is None:
                continue
            if wait != dispatch.watched_wait:
                dispatch.watched_wait, dispatch.stalls_at = wait, now + self._stall_timeout_s
                dispatch.wake_at = now + wake_s
            if (error := self._check_stream(dispatch, now)) is not None:
                dispatch.fail(error)
            elif now >= dispatch.wake_at:
                dispatch.wake_at = now + wake_s
                dispatch.wake()
        if self._watched:
            self._set_timer()

    def _check_stream(self, dispatch: Dispatch, now: float) -> Exception | None:
        """Return the error with which a wait must end, if it must."""
        if now >= dispatch.deadline:
            return RequestTimeoutError("the request took longer than this server allows")
        if now < dispatch.stalls_at:
            return None
        if allowance := self._view.stall_allowance(dispatch, self._stall_timeout_s):
            dispatch.stalls_at = now + allowance
            return None
        return ReplicaStalledError(dispatch.replica, self._stall_timeout_s)
