"""StallWatch: bounds the time that a request waits for a replica's next output."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from deployments.errors import ReplicaStalledError, RequestTimeoutError
from deployments.routing.cluster_view import ClusterView

__all__ = ["StallWatch"]

Item = TypeVar("Item")


class StallWatch:
    """Ends a wait when the replica has stalled or the request has reached its deadline.

    One timer serves all waits of an attempt: it is moved when it fires, not at every output. The time between two
    waits, in which the client reads, does not count.

    Args:
        view: knows whether a replica has a queue that explains a long wait.
        request_id: the request that waits.
        stall_timeout_s: seconds without an output after which a replica counts as stalled.
        deadline: when the request times out, on the event loop's clock.
    """

    def __init__(self, view: ClusterView, request_id: str, *, stall_timeout_s: float, deadline: float) -> None:
        self._view = view
        self._request_id = request_id
        self._stall_timeout_s = stall_timeout_s
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._wait: asyncio.Timeout | None = None  # the wait in progress
        self._stalls_at = 0.0  # when the wait in progress becomes a stall
        self._timer: asyncio.TimerHandle | None = None
        self._verdict: Exception | None = None  # why the wait in progress was ended

    async def wait_for(self, item: Awaitable[Item]) -> Item:
        """Return the awaited item.

        Raises:
            ReplicaStalledError: if it does not arrive within the stall timeout and no queue explains the wait.
            RequestTimeoutError: at the deadline.
        """
        self._verdict = None
        self._stalls_at = self._loop.time() + self._stall_timeout_s
        if self._timer is None:
            self._set_timer()
        try:
            async with asyncio.timeout(None) as self._wait:
                return await item
        except TimeoutError:
            if self._verdict is None:  # the replica has raised it
                raise
            raise self._verdict from None
        finally:
            self._wait = None

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self._timer = self._loop.call_at(min(self._stalls_at, self._deadline), self._check)

    def _check(self) -> None:
        """End the wait in progress, or look again later."""
        self._timer = None
        if self._wait is None:  # the next wait sets the timer
            return
        self._verdict = self._judge()
        if self._verdict is None:
            self._set_timer()
        else:
            self._wait.reschedule(self._loop.time())

    def _judge(self) -> Exception | None:
        """Return why the wait in progress must end, if it must."""
        now = self._loop.time()
        if now >= self._deadline:
            return RequestTimeoutError("the request took longer than this server allows")
        if now < self._stalls_at:  # an output has arrived since the timer was set
            return None
        if allowance := self._view.stall_allowance(self._request_id, self._stall_timeout_s):
            self._stalls_at = now + allowance
            return None
        return ReplicaStalledError(self._view.replica_of(self._request_id), self._stall_timeout_s)
