"""QueueBounds: which requests may wait, and who gives way when too many would.

The queue is bounded by requests and by the prompt tokens that have still to be computed. A request that would exceed a
bound is refused, unless waiting ones of lower priority can make room: then these are shed, the lowest in rank first.
Who has begun, here or on another replica, is never shed, and who was resumed never refused: somebody has seen tokens
of it. This module knows no threads and no clock; the engine asks it between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import OverloadedError
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.sequence import SequenceGroup

__all__ = ["QueueBounds"]

_LATER = "try again later"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The bounds of one engine's queue; None is no bound.

    Args:
        max_requests: that wait, at most, beyond those for which the batch has places: they only wait for the step.
        max_prefill_tokens: of all prompts, not yet computed nor cached, at most. It is no bound for a request that
            finds nobody waiting.
    """

    max_requests: int | None = None
    max_prefill_tokens: int | None = None

    def refuse_early(self, waiting: list[SequenceGroup], num_places: int, priority: int) -> None:
        """Refuse at no cost a newcomer whom the number of waiting requests alone keeps out.

        Args:
            waiting: by rank, the last in rank first.
            num_places: that are free in the batch.
            priority: of the newcomer.

        Raises:
            OverloadedError: if there is no room, and nobody of lower priority.
        """
        if self._has_room(len(waiting), num_places) or waiting[0].priority < priority:
            return
        raise OverloadedError(self._too_many(len(waiting)))

    def make_room(
        self, newcomer: SequenceGroup, waiting: list[SequenceGroup], num_places: int, backlog: PrefillBacklog
    ) -> list[SequenceGroup]:
        """Return who has to give way to a newcomer, nobody as a rule; the backlog counts them no more.

        Args:
            newcomer: not queued, and not in the backlog.
            waiting: by rank, the last in rank first.
            num_places: that are free in the batch.
            backlog: of the same queue.

        Raises:
            OverloadedError: if it must go itself. Then nothing has changed.
        """
        shed: list[SequenceGroup] = []
        victims = _victims(newcomer, waiting)
        refusal = self._why_not(newcomer, len(waiting), num_places, backlog)
        error = OverloadedError(refusal or "")
        while refusal is not None:
            victim = next(victims, None)
            if victim is None:
                for one in shed:
                    backlog.add(one)
                raise error
            backlog.remove(victim)
            shed.append(victim)
            refusal = self._why_not(newcomer, len(waiting) - len(shed), num_places, backlog)
        return shed

    def gave_way(self, victim: SequenceGroup, newcomer: SequenceGroup) -> OverloadedError:
        """Return what to tell the reader of a request that was shed."""
        bounds = {"max_queued_requests": self.max_requests, "max_queued_prefill_tokens": self.max_prefill_tokens}
        options = ", ".join(f"{name}={value}" for name, value in bounds.items() if value is not None)
        return OverloadedError(
            f"the queue is full ({options}), and this request of priority {victim.priority} made room for one of "
            f"priority {newcomer.priority}; {_LATER}"
        )

    def _has_room(self, num_waiting: int, num_places: int) -> bool:
        return not num_waiting or self.max_requests is None or num_waiting < self.max_requests + num_places

    def _too_many(self, num_waiting: int) -> str:
        return f"{num_waiting} requests wait already, and max_queued_requests={self.max_requests}; {_LATER}"

    def _why_not(
        self, newcomer: SequenceGroup, num_waiting: int, num_places: int, backlog: PrefillBacklog
    ) -> str | None:
        """Return what keeps a newcomer out of the queue, if something does."""
        if not self._has_room(num_waiting, num_places):
            return self._too_many(num_waiting)
        bound, sequence = self.max_prefill_tokens, newcomer.sequences[0]
        if bound is None or not num_waiting or backlog.num_tokens + sequence.num_tokens <= bound:
            return None
        needed = backlog.tokens_of(sequence)
        if backlog.num_tokens + needed <= bound:
            return None
        return (
            f"{backlog.num_tokens} prompt tokens wait to be computed, this request brings {needed} more, and "
            f"max_queued_prefill_tokens={bound}; {_LATER}"
        )


def _victims(newcomer: SequenceGroup, waiting: list[SequenceGroup]) -> Iterator[SequenceGroup]:
    """Yield who may be shed for a newcomer, the last in rank first."""
    for group in waiting:
        if group.priority >= newcomer.priority:
            return
        if not group.has_started:
            yield group
