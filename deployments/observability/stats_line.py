"""StatsLine: logs an engine's throughput and cache use every ten seconds, in the format of vLLM's stats line.

It reads the engine's recorder from its own thread. While the engine is idle it logs nothing, after one last line that
shows the idle state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from deployments.observability.recorder import Recorder
from engine.observability.metrics import (
    CACHE_HITS,
    CACHE_QUERIES,
    GENERATION_TOKENS,
    KV_USAGE,
    PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_SWAPPED,
    REQUESTS_WAITING,
    Metric,
)

__all__ = ["StatsLine"]

logger = logging.getLogger("ray.serve")

PERIOD_S = 10.0
HIT_RATE_PERIODS = 6  # the hit rate covers the last minute


class StatsLine:
    """Logs an engine's stats line.

    Args:
        recorder: where the engine reports its metrics.
        period_s: seconds between two lines.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, recorder: Recorder, period_s: float = PERIOD_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder = recorder
        self._period_s = period_s
        self._clock = clock
        self._last: dict[Metric, float] = {}
        self._last_time = clock()
        self._lookups: deque[tuple[float, float]] = deque(maxlen=HIT_RATE_PERIODS)  # (hit tokens, looked-up tokens)
        self._was_active = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats-line", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if (line := self.line()) is not None:
                logger.info("%s", line)

    def line(self) -> str | None:
        """Return the line for the time since the last call; None while the engine is idle."""
        now = self._clock()
        values = {series.metric: series.value for series in self._recorder.snapshot() if not series.labels}
        seconds = max(now - self._last_time, 1e-9)

        def gain(metric: Metric) -> float:
            return values.get(metric, 0.0) - self._last.get(metric, 0.0)

        prompt, generated = gain(PROMPT_TOKENS), gain(GENERATION_TOKENS)
        self._lookups.append((gain(CACHE_HITS), gain(CACHE_QUERIES)))
        self._last, self._last_time = values, now
        running = values.get(REQUESTS_RUNNING, 0.0)
        waiting = values.get(REQUESTS_WAITING, 0.0) + values.get(REQUESTS_SWAPPED, 0.0)
        is_active = any((prompt, generated, running, waiting))
        if not is_active and not self._was_active:
            return None
        self._was_active = is_active
        hit, looked_up = (sum(column) for column in zip(*self._lookups, strict=True))
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {running:.0f} reqs, Waiting: {waiting:.0f} reqs, "
            f"KV cache usage: {100 * values.get(KV_USAGE, 0.0):.1f}%, "
            f"Prefix cache hit rate: {100 * hit / looked_up if looked_up else 0.0:.1f}%"
        )
