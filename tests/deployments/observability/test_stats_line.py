"""The engine's log line every ten seconds."""

from __future__ import annotations

import logging
import time

from deployments.observability.recorder import Recorder
from deployments.observability.stats_line import StatsLine
from engine.observability.metrics import (
    CACHE_HITS,
    CACHE_QUERIES,
    GENERATION_TOKENS,
    KV_USAGE,
    PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_SWAPPED,
    REQUESTS_WAITING,
)
from tests.waiting import until

Log = list[logging.LogRecord]


def test_the_stats_line_covers_the_time_since_the_last_one() -> None:
    recorder, now = Recorder(), [100.0]
    stats = StatsLine(recorder, clock=lambda: now[0])
    assert stats.line() is None  # nothing has happened yet
    recorder.increment(PROMPT_TOKENS, 500)
    recorder.increment(CACHE_QUERIES, 500)
    recorder.increment(CACHE_HITS, 400)
    recorder.increment(GENERATION_TOKENS, 123)
    for metric, value in ((REQUESTS_RUNNING, 3), (REQUESTS_WAITING, 2), (REQUESTS_SWAPPED, 1), (KV_USAGE, 0.456)):
        recorder.set(metric, value)
    now[0] += 10
    assert stats.line() == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 12.3 tokens/s, Running: 3 reqs, "
        "Waiting: 3 reqs, KV cache usage: 45.6%, Prefix cache hit rate: 80.0%"
    )
    recorder.increment(GENERATION_TOKENS, 10)
    now[0] += 5
    second = stats.line()
    assert second is not None
    assert "prompt throughput: 0.0 tokens/s, Avg generation throughput: 2.0 tokens/s" in second
    assert "hit rate: 80.0%" in second  # of the last minute


def test_an_idle_engine_logs_one_line() -> None:
    recorder, now = Recorder(), [0.0]
    stats = StatsLine(recorder, clock=lambda: now[0])
    recorder.increment(GENERATION_TOKENS, 10)
    lines = []
    for _ in range(8):
        now[0] += 10
        lines.append(stats.line())
    assert [line is not None for line in lines] == [True, True] + [False] * 6
    assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in str(lines[1])
    recorder.increment(CACHE_QUERIES, 10)
    recorder.increment(PROMPT_TOKENS, 10)
    now[0] += 10
    assert "hit rate: 0.0%" in str(stats.line())  # what was long ago does not count


def test_an_engine_with_a_waiting_request_is_not_idle() -> None:
    recorder = Recorder()
    recorder.set(REQUESTS_WAITING, 1)
    stats = StatsLine(recorder, clock=time.monotonic)
    assert all(stats.line() is not None for _ in range(3))


def test_the_line_comes_from_a_thread(serve_log: Log) -> None:
    recorder = Recorder()
    stats = StatsLine(recorder, period_s=0.01)
    stats.start()
    recorder.increment(GENERATION_TOKENS, 5)
    until(lambda: serve_log, "a line is logged", pause_s=0.01)
    stats.stop()
    assert serve_log[0].getMessage().startswith("Avg prompt throughput: ")
