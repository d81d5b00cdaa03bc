"""The first row: one number each for replicas, latency, throughput, cache and queue."""

from __future__ import annotations

from k8s.monitoring.panels import BLUE, GREEN, RED, TOKENS_PER_SECOND, YELLOW, stat
from k8s.monitoring.promql import engine, hit_ratio, ingress, quantile, rate_or_zero

__all__ = ["AT_A_GLANCE"]

RUNNING = 'state="running"'

AT_A_GLANCE = [
    stat(
        "Replicas running",
        "Engine replicas that accept requests, as seen by the ingresses.",
        "none",
        f"max({ingress('replicas', RUNNING)})",
        base_colour=RED,
        thresholds=[(1, GREEN)],
        decimals=0,
    ),
    stat(
        "Time to first token, p99",
        "99 of 100 requests received their first token within this time.",
        "s",
        quantile(0.99, "time_to_first_token_seconds"),
        thresholds=[(1, YELLOW), (2.5, RED)],
    ),
    stat(
        "Generated tokens",
        "Tokens generated per second by all selected replicas.",
        TOKENS_PER_SECOND,
        rate_or_zero(engine("generation_tokens_total")),
        base_colour=BLUE,
        decimals=0,
    ),
    stat(
        "Hit rate",
        "Share of prompt tokens served from the prefix caches.",
        "percentunit",
        hit_ratio(),
        base_colour=BLUE,
        limits=(0, 1),
        decimals=0,
    ),
    stat(
        "Fullest KV cache",
        "Share of KV blocks in use by running sequences, at the fullest replica.",
        "percentunit",
        f"max({engine('kv_cache_usage_ratio')})",
        thresholds=[(0.8, YELLOW), (0.95, RED)],
        limits=(0, 1),
        decimals=0,
    ),
    stat(
        "Waiting requests",
        "Sequences in the waiting queues of all selected replicas.",
        "none",
        f"sum({engine('num_requests_waiting')})",
        thresholds=[(1, YELLOW), (64, RED)],
        decimals=0,
    ),
]
