"""Retries: which replicas have failed a request, and whether another one may compute it."""

from __future__ import annotations

import logging

from deployments.errors import ReplicasLostError, is_replica_loss, unwrap
from deployments.observability.ingress_metrics import REQUEST_HANDOVERS, REQUEST_MIGRATIONS, ingress_recorder
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.errors import HandedOverError, StreamPausedError
from engine.errors import OverloadedError

__all__ = ["Retries"]

logger = logging.getLogger("ray.serve")

MAX_OVERLOAD_RETRIES = 1  # attempts after a full replica


class Retries:
    """The failed attempts of one request.

    Args:
        request_id: names the request in the log.
        max_migrations: how many lost replicas it survives.

    Attributes:
        avoid: replicas that have failed it.
        num_migrations: lost replicas so far.
        handed_over_by: the replica that has ended the last attempt so that another one continues it; empty if another
            cause has.
    """

    def __init__(self, request_id: str, max_migrations: int) -> None:
        self._request_id = request_id
        self._max_migrations = max_migrations
        self._num_overloads = 0
        self._num_pauses = self._num_handovers = 0
        self.handed_over_by = ""
        self.avoid: list[str] = []
        self.num_migrations = 0

    def __len__(self) -> int:
        """Return the number of failed attempts after which the request was sent again."""
        return self._num_overloads + self.num_migrations + self._num_pauses + self._num_handovers

    def prepare(self, dispatch: Dispatch, error: Exception) -> None:
        """Avoid the replica of a failed dispatch from now on, unless it has paused or handed over the request.

        Raises:
            Exception: the error, if another replica cannot do better.
            ReplicasLostError: after too many lost replicas.
        """
        error = unwrap(error)
        replica = dispatch.replica = getattr(error, "replica", "") or dispatch.replica
        dispatch.error = type(error).__name__
        self.handed_over_by = ""
        if isinstance(error, StreamPausedError):
            self._num_pauses += 1
            return
        if isinstance(error, HandedOverError):
            self._num_handovers += 1
            self.handed_over_by = replica
            ingress_recorder().increment(REQUEST_HANDOVERS)
            return
        if isinstance(error, OverloadedError):
            if not replica or replica in self.avoid or self._num_overloads >= MAX_OVERLOAD_RETRIES:
                raise error
            self._num_overloads += 1
        elif is_replica_loss(error):
            self._migrate(error, replica)
        else:
            raise error
        if replica and replica not in self.avoid:
            self.avoid.append(replica)

    def _migrate(self, error: Exception, replica: str) -> None:
        """Count a migration; raises if there were too many."""
        if self.num_migrations >= self._max_migrations:
            raise ReplicasLostError(self.num_migrations + 1) from error
        self.num_migrations += 1
        ingress_recorder().increment(REQUEST_MIGRATIONS)
        logger.warning(
            "replica %s was lost (%s); another one continues its request, request_id=%s",
            replica or "(unknown)",
            error,
            self._request_id,
        )
