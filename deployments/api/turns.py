"""Turns: spreads the work of many requests that arrive at once over several turns of the event loop.

Without it, a burst of requests is prepared in one turn of some seconds, in which no health check is answered and no
stream gets its tokens. Clients take turns too: one that sends a burst does not make the others wait for its end.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["REQUESTS_PER_TURN", "Turns"]

REQUESTS_PER_TURN = 32  # of the event loop; to prepare one takes half a millisecond


class Turns:
    """Lets at most ``per_turn`` callers continue in each turn of the event loop; the others wait.

    The callers of one client continue in their order, and clients alternate.

    Args:
        per_turn: number of callers.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn  # in this turn
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the next one first

    async def wait(self, client: str = "") -> None:
        """Return in the next turn that has room for this client: at once, if this one has and no one waits."""
        if self._left == self._per_turn:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        await future

    def _next_turn(self) -> None:
        """Let the next callers go on. While there are any, this is called once in each turn."""
        self._left = self._per_turn
        while self._left and self._waiting:
            client, futures = next(iter(self._waiting.items()))
            future = futures.popleft()
            del self._waiting[client]
            if futures:
                self._waiting[client] = futures  # after all others
            if not future.done():  # its request may have been cancelled
                future.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            asyncio.get_running_loop().call_soon(self._next_turn)
