"""LineSlots: how many lines of all batches may be unfinished at once; the limit follows the number of engines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["LineSlots"]


class LineSlots:
    """A semaphore whose limit changes. Those who wait get a slot in the order of their arrival.

    Args:
        limit: returns the present number of slots.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._num_used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for a slot and take it."""
        if not self._waiting and self._num_used < self._limit():
            self._num_used += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled():  # it was given a slot at the same time
                self.release()
            raise

    def release(self) -> None:
        """Give a slot back."""
        self._num_used -= 1
        self.wake()

    def wake(self) -> None:
        """Give free slots to those who wait: the limit may have changed."""
        while self._waiting and self._num_used < self._limit():
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._num_used += 1
                waiter.set_result(None)
