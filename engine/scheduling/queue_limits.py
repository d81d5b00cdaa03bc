"""QueueLimits: which requests may wait, and which waiting ones are rejected to make room for more important ones.

The queue is limited by its number of requests and by their prompt tokens that are not computed yet. A request that
exceeds a limit is rejected, unless rejecting waiting requests of lower priority makes room for it. The lowest priority
and then the last one to start is rejected first. A request that has started, here or on another replica, is never
rejected to make room, and a resumed request is not checked against the limits: the client may already have seen its
tokens.

This module knows the queue and its backlog. It knows no threads and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import OverloadedError
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.sequence import SequenceGroup

__all__ = ["QueueLimits"]

_LATER = "try again later"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of one engine's waiting queue; None sets no limit.

    Args:
        max_requests: waiting requests, at most, not counting those for which the batch has a free slot: they start with
            the next step.
        max_prefill_tokens: prompt tokens that are neither computed nor cached, at most, of all unfinished requests. An
            empty queue accepts a request of any length.
    """

    max_requests: int | None = None
    max_prefill_tokens: int | None = None

    def reject_early(self, waiting: list[SequenceGroup], num_free_slots: int, priority: int) -> None:
        """Reject a new request if the number of waiting requests excludes it, before its sequence is created.

        Args:
            waiting: the queue, the request that starts last first.
            num_free_slots: free slots of the batch.
            priority: priority of the new request.

        Raises:
            OverloadedError: if the queue is full and no request in it has a lower priority.
        """
        if self._has_room(len(waiting), num_free_slots) or waiting[0].priority < priority:
            return
        raise OverloadedError(self._too_many(len(waiting)))

    def choose_rejected(
        self, new_request: SequenceGroup, waiting: list[SequenceGroup], num_free_slots: int, backlog: PrefillBacklog
    ) -> list[SequenceGroup]:
        """Return the waiting requests to reject so that the new one fits, usually none; removes them from the backlog.

        Args:
            new_request: a request that is neither in the queue nor in the backlog.
            waiting: the queue, the request that starts last first.
            num_free_slots: free slots of the batch.
            backlog: the backlog of the same queue.

        Raises:
            OverloadedError: if the new request itself must be rejected. Then nothing has changed.
        """
        rejected: list[SequenceGroup] = []
        victims = _victims(new_request, waiting)
        exceeded = self._exceeded_limit(new_request, len(waiting), num_free_slots, backlog)
        error = OverloadedError(exceeded or "")  # states the queue as the new request found it
        while exceeded is not None:
            victim = next(victims, None)
            if victim is None:
                for group in rejected:
                    backlog.add_group(group)
                raise error
            backlog.remove_group(victim)
            rejected.append(victim)
            exceeded = self._exceeded_limit(new_request, len(waiting) - len(rejected), num_free_slots, backlog)
        return rejected

    def rejection(self, victim: SequenceGroup, new_request: SequenceGroup) -> OverloadedError:
        """Return the error for the client of ``victim``, which was rejected to make room for ``new_request``."""
        limits = {"max_queued_requests": self.max_requests, "max_queued_prefill_tokens": self.max_prefill_tokens}
        options = ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)
        return OverloadedError(
            f"the queue is full ({options}), and this request of priority {victim.priority} made room for one of "
            f"priority {new_request.priority}; {_LATER}"
        )

    def _has_room(self, num_waiting: int, num_free_slots: int) -> bool:
        return not num_waiting or self.max_requests is None or num_waiting < self.max_requests + num_free_slots

    def _too_many(self, num_waiting: int) -> str:
        return f"{num_waiting} requests wait already, and max_queued_requests={self.max_requests}; {_LATER}"

    def _exceeded_limit(
        self, new_request: SequenceGroup, num_waiting: int, num_free_slots: int, backlog: PrefillBacklog
    ) -> str | None:
        """Return an error message with the limit that the new request exceeds; None if it fits."""
        if not self._has_room(num_waiting, num_free_slots):
            return self._too_many(num_waiting)
        limit, sequence = self.max_prefill_tokens, new_request.sequences[0]
        if limit is None or not num_waiting or backlog.num_tokens + sequence.num_tokens <= limit:
            return None
        needed = backlog.tokens_of(sequence)
        if backlog.num_tokens + needed <= limit:
            return None
        return (
            f"{backlog.num_tokens} prompt tokens wait to be computed, this request brings {needed} more, and "
            f"max_queued_prefill_tokens={limit}; {_LATER}"
        )


def _victims(new_request: SequenceGroup, waiting: list[SequenceGroup]) -> Iterator[SequenceGroup]:
    """Yield the waiting requests that may be rejected for the new one, the request that starts last first."""
    for group in waiting:
        if group.priority >= new_request.priority:
            return
        if not group.has_started:
            yield group
