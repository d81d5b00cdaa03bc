"""PoolingMetrics: the values of the engine's metrics that a pooling engine has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from time import monotonic

from engine.config import EngineInfo
from engine.errors import OverloadedError, RequestError
from engine.observability.metrics import (
    E2E_LATENCY,
    ENGINE_INFO,
    ENGINE_START_TIME,
    PREFILL_TIME,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_PROMPT,
    REQUESTS_FINISHED,
    REQUESTS_REJECTED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    STEP_SECONDS,
    STEP_TOKENS,
    MetricSink,
)
from engine.pooling.queue import TextQueue, WaitingText

__all__ = ["PoolingMetrics"]


class PoolingMetrics:
    """Reports the texts and batches of one engine to a sink.

    Args:
        sink: stores the values.
        queue: what waits.
    """

    def __init__(self, sink: MetricSink, queue: TextQueue) -> None:
        self._sink = sink
        self._queue = queue

    def report_start(self, model: str, info: EngineInfo) -> None:
        """Report that the engine is ready, with the labels of ``ENGINE_INFO``."""
        assert info.pooling is not None
        self._sink.set(
            ENGINE_INFO,
            1,
            model=model,
            block_size="",
            num_blocks="0",
            attention_backend=info.attention_backend,
            dtype=info.dtype,
            kv_cache_dtype=info.kv_cache_dtype,
            task=info.pooling.task,
        )
        self._sink.set(ENGINE_START_TIME, time.time())
        self.state_changed()

    def rejected(self, error: RequestError) -> None:
        """Count a request that was rejected."""
        is_overload = isinstance(error, OverloadedError)
        self._sink.increment(REQUESTS_REJECTED, reason=error.param or ("overloaded" if is_overload else "invalid"))

    def state_changed(self) -> None:
        """Report how many texts wait. Between two steps none runs."""
        self._sink.set(REQUESTS_WAITING, len(self._queue))
        self._sink.set(REQUESTS_RUNNING, 0)

    def step_finished(self, batch: Sequence[WaitingText], scheduled_s: float, seconds: float) -> None:
        """Report a batch that has taken ``scheduled_s`` to choose and ``seconds`` to compute."""
        now, num_tokens = monotonic(), sum(text.num_tokens for text in batch)
        self._sink.increment(PROMPT_TOKENS, num_tokens)
        self._sink.observe(STEP_TOKENS, num_tokens)
        self._sink.observe(STEP_SECONDS, scheduled_s, phase="schedule")
        self._sink.observe(STEP_SECONDS, seconds, phase="forward")
        for text in batch:
            self._sink.observe(QUEUE_TIME, max(0.0, now - seconds - text.arrived))
            self._sink.observe(PREFILL_TIME, seconds)
            self._sink.observe(E2E_LATENCY, now - text.arrived)

    def ended(self, text: WaitingText, reason: str) -> None:
        """Count a request that has left the engine."""
        self._sink.increment(REQUESTS_FINISHED, reason=reason)
        self._sink.observe(REQUEST_PROMPT, text.num_tokens)
