"""LoadReporter: limits how often changes of an engine's load are reported."""

from __future__ import annotations

from collections.abc import Callable

from engine.observability.load import EngineLoad

__all__ = ["LoadReporter"]

# Seconds after which a new number of steps or of free blocks is reported although nothing else has changed. Routers
# regard a replica as stuck if it has waiting requests and reports no new steps.
DECODE_INTERVAL_S = 0.25


class LoadReporter:
    """Reports the load when the queue or the batch has changed, at most once in ``interval_s``.

    While the engine only decodes, it reports the new number of steps and of free blocks every ``DECODE_INTERVAL_S``.

    Args:
        listener: receives the reports in the step thread; its exceptions reach the caller of ``update``.
        interval_s: least time between two reports of a busy engine.
        clock: monotonic seconds.
    """

    def __init__(self, listener: Callable[[EngineLoad], None], interval_s: float, clock: Callable[[], float]) -> None:
        self._listener = listener
        self._interval_s = interval_s
        self._clock = clock
        self._reported_at = float("-inf")
        self._reported: EngineLoad | None = None
        self._num_changes = 0

    def update(self, load: EngineLoad, num_changes: int, *, is_idle: bool) -> float | None:
        """Report the load now if it has changed and the interval has passed.

        Args:
            load: the load now.
            num_changes: requests that have arrived so far, plus those that have left.
            is_idle: whether the engine has nothing to compute; if so, any difference is reported.

        Returns:
            Seconds after which to call again, if a report must wait for the interval to pass; None otherwise.
        """
        now = self._clock()
        any_change_counts = is_idle or now - self._reported_at >= DECODE_INTERVAL_S
        if num_changes == self._num_changes and not self._has_changed(load, any_change_counts=any_change_counts):
            return None
        if (remaining_s := self._reported_at + self._interval_s - now) > 0:
            return remaining_s
        self._reported_at, self._reported, self._num_changes = now, load, num_changes
        self._listener(load)
        return None

    def _has_changed(self, load: EngineLoad, *, any_change_counts: bool) -> bool:
        """Whether the queue or the batch differs from the last report, or anything at all if that counts."""
        last = self._reported
        if last is None or any_change_counts:
            return load != last
        return (load.num_waiting, load.num_running, load.queued_prefill_tokens) != (
            last.num_waiting,
            last.num_running,
            last.queued_prefill_tokens,
        )
