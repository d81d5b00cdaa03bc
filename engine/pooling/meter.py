"""PoolingMeter: measures how fast a pooling engine computes, and how much it has to compute."""

from __future__ import annotations

from collections.abc import Sequence

from engine.observability.load import EngineLoad, EngineStats
from engine.pooling.queue import TextQueue, WaitingText

__all__ = ["PoolingMeter"]

HALF_LIFE_TOKENS = 32_768  # after these many tokens the weight of a measurement has halved


class PoolingMeter:
    """Counts steps and requests, and measures tokens per second: the ratio of two decayed sums.

    Args:
        queue: what waits.

    Attributes:
        num_changes: requests that have arrived, and requests that have left.
        num_running: texts of the batch that is computed.
    """

    def __init__(self, queue: TextQueue) -> None:
        self._queue = queue
        self._tokens = self._seconds = 0.0
        self.num_steps = self.num_changes = self.num_running = 0

    def step_finished(self, batch: Sequence[WaitingText], seconds: float) -> None:
        """Count a batch that has been computed."""
        num_tokens = sum(text.num_tokens for text in batch)
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self._tokens = decay * self._tokens + num_tokens
        self._seconds = decay * self._seconds + seconds
        self.num_steps += 1
        self.num_changes += len(batch)
        self.num_running = 0

    def load(self) -> EngineLoad:
        """Return the numbers as they are now. No block is ever used, as there is no KV cache."""
        return EngineLoad(
            num_running=self.num_running,
            num_waiting=len(self._queue),
            queued_prefill_tokens=self._queue.num_tokens,
            num_blocks=1,
            num_free_blocks=1,
            prefill_tokens_per_s=self._tokens / self._seconds if self._seconds else 0.0,
            num_steps=self.num_steps,
        )

    def stats(self) -> EngineStats:
        """Count texts by state."""
        return EngineStats(
            num_running=self.num_running,
            num_waiting=len(self._queue),
            num_swapped=0,
            num_free_blocks=0,
            num_cached_blocks=0,
            num_used_blocks=0,
        )
