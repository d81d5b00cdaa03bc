"""ReplicaLoad: how busy one replica is, as one ingress knows it.

What the replica last reported, and what this ingress has dispatched to it since: a report that arrives now was taken a
little earlier, and what was dispatched within that time is not in it.

It knows nothing of caches, of other replicas, or of what the numbers are used for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from engine.observability.load import EngineLoad

__all__ = ["ReplicaLoad"]


@dataclass(slots=True, eq=False)
class _Dispatch:
    """A request that this ingress sent and has not seen the end of."""

    request_id: str
    at: float
    tokens: int  # to be computed there, as far as was known


class ReplicaLoad:
    """One replica's load in tokens and requests; times are monotonic seconds."""

    __slots__ = (
        "_in_flight",
        "_in_flight_tokens",
        "_moved_at",
        "_unreported",
        "_unreported_tokens",
        "report",
        "reported_at",
    )

    def __init__(self) -> None:
        self.report: EngineLoad | None = None
        self.reported_at = -inf
        self._moved_at = -inf  # when num_steps was first seen as it is
        self._in_flight: list[_Dispatch] = []
        self._in_flight_tokens = 0
        self._unreported: deque[_Dispatch] = deque()
        self._unreported_tokens = 0

    def dispatched(self, request_id: str, tokens: int, now: float) -> None:
        """Count a request in."""
        dispatch = _Dispatch(request_id, now, tokens)
        self._in_flight.append(dispatch)
        self._unreported.append(dispatch)
        self._in_flight_tokens += tokens
        self._unreported_tokens += tokens

    def completed(self, request_id: str) -> None:
        """Count a request out, the oldest if it has no id; one that is not known has been counted out before."""
        for index, dispatch in enumerate(self._in_flight):
            if not request_id or dispatch.request_id == request_id:
                del self._in_flight[index]
                self._in_flight_tokens -= dispatch.tokens
                if dispatch in self._unreported:
                    self._unreported.remove(dispatch)
                    self._unreported_tokens -= dispatch.tokens
                return

    def reported(self, report: EngineLoad, *, now: float, transit_s: float) -> None:
        """Take a report that arrives now and does not know of the dispatches of the last ``transit_s``."""
        if self.report is None or report.num_steps != self.report.num_steps:
            self._moved_at = now
        self.report, self.reported_at = report, now
        while self._unreported and self._unreported[0].at <= now - transit_s:
            self._unreported_tokens -= self._unreported.popleft().tokens

    def moved_since(self, time: float) -> bool:
        """Whether a step was seen to end after ``time``."""
        return self._moved_at >= time

    def queued_tokens(self, *, fresh: bool) -> int:
        """Return the prompt tokens to compute: reported and dispatched since, or all of ours if no report is fresh."""
        if fresh and self.report is not None:
            return self.report.queued_prefill_tokens + self._unreported_tokens
        return self._in_flight_tokens

    def waiting_requests(self, *, fresh: bool) -> int:
        """Return the requests that wait, counted like ``queued_tokens``."""
        if fresh and self.report is not None:
            return self.report.num_waiting + len(self._unreported)
        return len(self._in_flight)

    @property
    def prefill_rate(self) -> float:
        """Measured prefill tokens per second, 0 while unknown."""
        return self.report.prefill_tokens_per_s if self.report is not None else 0.0

    def decode_pressure(self, *, fresh: bool) -> float:
        """How crowded the batch is, in seconds; 0 while unknown.

        A step's time for each request in it or on its way there, since everybody waits for the others' tokens, and the
        share of the KV pool in use, since preemption is near when it is full.
        """
        report = self.report
        if not fresh or report is None or not report.num_blocks:
            return 0.0
        requests = report.num_running + report.num_waiting + len(self._unreported)
        return requests * report.decode_step_s + 1 - report.num_free_blocks / report.num_blocks
