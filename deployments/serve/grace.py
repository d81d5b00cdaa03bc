"""Grace: how long a replica that shuts down may continue, and when it hands over what it has not finished.

Serve kills a replica after its ``graceful_shutdown_timeout_s``. If the replica's node drains, because a spot instance
is taken back or Kubernetes ends its pod, the node may end sooner. That notice may come before the shutdown or later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf
from typing import Any

import ray

__all__ = ["Grace", "seconds_left"]

logger = logging.getLogger("ray.serve")

HAND_OVER_S = 10.0  # before the end: what the streams of a replica take to move, with their KV
MAX_SHARE = 0.5  # of a short grace
ENDING_S = 1.0  # for the rest of a shutdown, once no page is lent
MAX_ENDING_SHARE = 0.1  # of a short grace
ASK_EVERY_S = 3.0
ANSWER_TIMEOUT_S = 1.0  # of Ray's control store


class Grace:
    """The time that is left to a replica. It becomes shorter with a notice to the replica's node, never longer.

    Args:
        limit_s: Serve's time-out, from now.
        clock: returns monotonic seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_unknown = False
        self._ends_at = self._hand_over_at = self._lend_until = inf
        self._shorten(limit_s)

    @property
    def seconds(self) -> float:
        """Seconds until the replica is killed."""
        return self._ends_at - self._clock()

    @property
    def hand_over_in_s(self) -> float:
        """Seconds until unfinished requests are handed over; 0 or less: now."""
        return self._hand_over_at - self._clock()

    @property
    def lending_s(self) -> float:
        """Seconds for which pages may be lent, so that the replica still ends by itself."""
        return self._lend_until - self._clock()

    def ask(self) -> None:
        """Ask Ray's control store whether this node drains. It takes up to ``ANSWER_TIMEOUT_S``."""
        try:
            deadlines = _deadlines()
            node: str = ray.get_runtime_context().get_node_id()
        except Exception as error:  # Ray's control store may be gone, with the node
            if not self._is_unknown:
                logger.warning("whether this node drains is not known: %s", error)
            self._is_unknown = True
            return
        self._shorten(seconds_left(deadlines.get(node, 0), time.time()))

    async def keep_asking(self) -> None:
        """Ask every ``ASK_EVERY_S`` seconds, in a thread, until the task is cancelled."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            before = self._ends_at
            await asyncio.to_thread(self.ask)
            if self._ends_at < before:
                logger.info("this node ends: the engine shuts down within %.1f s", self.seconds)

    def _shorten(self, seconds: float) -> None:
        now = self._clock()
        hand_over_s = min(HAND_OVER_S, MAX_SHARE * seconds)
        ending_s = min(ENDING_S, MAX_ENDING_SHARE * seconds)
        self._ends_at = min(self._ends_at, now + seconds)
        self._hand_over_at = min(self._hand_over_at, now + seconds - hand_over_s)
        self._lend_until = min(self._lend_until, now + seconds - ending_s)


def seconds_left(deadline_ms: int, now: float) -> float:
    """Return the seconds until a node ends; infinity if its deadline, in Unix milliseconds, is 0: there is none."""
    return max(0.0, deadline_ms / 1000 - now) if deadline_ms else inf


def _deadlines() -> dict[str, int]:
    """Return when each draining node ends, by its id, in Unix milliseconds; 0: no deadline."""
    from ray._private import worker

    client: Any = worker.global_worker.gcs_client  # type: ignore[attr-defined]
    deadlines: dict[str, int] = client.get_draining_nodes(timeout=ANSWER_TIMEOUT_S)
    return deadlines
