"""ReplicaLoad: the queue and the batch of one replica, as one ingress estimates them.

The estimate is the replica's last report plus the requests that this ingress has dispatched since. A report is a little
older than its arrival, so requests dispatched shortly before it arrived are not in it.

It knows nothing of caches, of other replicas, or of what the numbers are used for.
"""

from __future__ import annotations

from collections import deque
from math import inf

from deployments.transport.request_channel.dispatch import Dispatch
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts

__all__ = ["ReplicaLoad"]

_UNKNOWN = StepCosts()


class ReplicaLoad:
    """One replica's load in tokens and requests; times are monotonic seconds."""

    __slots__ = (
        "_in_flight",
        "_in_flight_context",
        "_in_flight_tokens",
        "_last_step_at",
        "_unreported",
        "_unreported_context",
        "_unreported_tokens",
        "report",
    )

    def __init__(self) -> None:
        self.report: EngineLoad | None = None
        self._last_step_at = -inf  # when num_steps of the reports last changed
        self._in_flight: set[Dispatch] = set()
        self._in_flight_tokens = self._in_flight_context = 0
        self._unreported: deque[Dispatch] = deque()
        self._unreported_tokens = self._unreported_context = 0

    @property
    def has_dispatches(self) -> bool:
        """Whether a request that this ingress has sent is unfinished."""
        return bool(self._in_flight)

    def sent(self, dispatch: Dispatch) -> None:
        """Add a request of this ingress."""
        self._in_flight.add(dispatch)
        self._unreported.append(dispatch)
        self._in_flight_tokens += dispatch.num_uncached_tokens
        self._unreported_tokens += dispatch.num_uncached_tokens
        self._in_flight_context += dispatch.request.num_tokens
        self._unreported_context += dispatch.request.num_tokens

    def ended(self, dispatch: Dispatch) -> None:
        """Remove a request; one that is not in flight here was removed before."""
        if dispatch not in self._in_flight:
            return
        self._in_flight.remove(dispatch)
        self._in_flight_tokens -= dispatch.num_uncached_tokens
        self._in_flight_context -= dispatch.request.num_tokens
        if dispatch in self._unreported:
            self._unreported.remove(dispatch)
            self._count_reported(dispatch)

    def reported(self, report: EngineLoad, *, now: float, transit_s: float) -> None:
        """Apply a report that arrives now and does not include the dispatches of the last ``transit_s`` seconds."""
        if self.report is None or report.num_steps != self.report.num_steps:
            self._last_step_at = now
        self.report = report
        while self._unreported and self._unreported[0].sent_at <= now - transit_s:
            self._count_reported(self._unreported.popleft())

    def _count_reported(self, dispatch: Dispatch) -> None:
        self._unreported_tokens -= dispatch.num_uncached_tokens
        self._unreported_context -= dispatch.request.num_tokens

    def has_stepped_since(self, time: float) -> bool:
        """Return whether the engine was seen to finish a step at or after ``time``."""
        return self._last_step_at >= time

    def queued_tokens(self, *, fresh: bool) -> int:
        """Return the queued prompt tokens: reported plus unreported dispatches; without a fresh report our own ones."""
        if fresh and self.report is not None:
            return self.report.queued_prefill_tokens + self._unreported_tokens
        return self._in_flight_tokens

    def waiting_requests(self, *, fresh: bool) -> int:
        """Return the number of waiting requests, estimated like ``queued_tokens``."""
        if fresh and self.report is not None:
            return self.report.num_waiting + len(self._unreported)
        return len(self._in_flight)

    @property
    def prefill_rate(self) -> float:
        """Measured prefill tokens per second; 0 while unknown."""
        return self.report.prefill_tokens_per_s if self.report is not None else 0.0

    @property
    def step_costs(self) -> StepCosts | None:
        """The measured costs of steps; None while unknown."""
        if self.report is None or self.report.step_costs == _UNKNOWN:
            return None
        return self.report.step_costs

    def pending(self, *, fresh: bool) -> tuple[int, int]:
        """Return the number of answers whose prompts are not computed, and the tokens in their contexts."""
        if fresh and self.report is not None:
            report = self.report
            return report.num_pending + len(self._unreported), report.num_pending_tokens + self._unreported_context
        return len(self._in_flight), self._in_flight_context

    def decoding(self, *, fresh: bool) -> tuple[int, int]:
        """Return the number of answers that every step continues, and the tokens in their contexts; 0 while unknown."""
        if fresh and self.report is not None:
            return self.report.num_decoding, self.report.num_decoding_tokens
        return 0, 0
