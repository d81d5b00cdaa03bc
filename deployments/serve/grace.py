"""Grace: how long a replica that shuts down may go on, and when it hands over what it has not finished.

Serve kills a replica after its ``graceful_shutdown_timeout_s``. If the replica's node drains, because a spot instance
is taken back or Kubernetes ends its pod, the node may end sooner.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray

__all__ = ["Grace", "seconds_left"]

logger = logging.getLogger("ray.serve")

HAND_OVER_S = 10.0  # before the end: what the streams of a replica take to move, with their KV
MAX_SHARE = 0.5  # of a short grace
ANSWER_TIMEOUT_S = 1.0  # of Ray's control store


@dataclass(frozen=True, slots=True)
class Grace:
    """The time that is left to a replica.

    Attributes:
        seconds: until it is killed.
    """

    seconds: float

    @classmethod
    def of_this_replica(cls, limit_s: float) -> Grace:
        """Return what is left when Serve begins to stop this replica.

        Args:
            limit_s: Serve's time-out.
        """
        try:
            deadlines = _deadlines()
            node: str = ray.get_runtime_context().get_node_id()
        except Exception as error:  # Ray's control store may be gone, with the node
            logger.warning("whether this node drains is not known: %s", error)
            deadlines, node = {}, ""
        return cls(min(limit_s, seconds_left(deadlines.get(node, 0), time.time())))

    @property
    def hand_over_after_s(self) -> float:
        """Seconds after which unfinished requests are handed over."""
        return self.seconds - min(HAND_OVER_S, MAX_SHARE * self.seconds)


def seconds_left(deadline_ms: int, now: float) -> float:
    """Return the seconds until a node ends; infinity if its deadline, in Unix milliseconds, is 0: there is none."""
    return max(0.0, deadline_ms / 1000 - now) if deadline_ms else float("inf")


def _deadlines() -> dict[str, int]:
    """Return when each draining node ends, by its id, in Unix milliseconds; 0: no deadline."""
    from ray._private import worker

    client: Any = worker.global_worker.gcs_client  # type: ignore[attr-defined]
    deadlines: dict[str, int] = client.get_draining_nodes(timeout=ANSWER_TIMEOUT_S)
    return deadlines
