"""The KV cache: blocks in use, hits, evictions and preemptions."""

from __future__ import annotations

from k8s.monitoring.panels import BLUE, GREEN, ORANGE, RED, YELLOW, Panel
from k8s.monitoring.promql import engine, hit_ratio, rate

__all__ = ["KV_CACHE"]

EACH_BLOCK_ONCE = 'state=~"used|cached|free"'  # without shared, which is a part of used

KV_CACHE = [
    Panel(
        "KV cache in use",
        "Share of KV blocks in use by running sequences. Near 100%, sequences are preempted.",
        "percentunit",
        [("{{replica}}", f"max by (replica) ({engine('kv_cache_usage_ratio')})")],
        thresholds=[(0.9, YELLOW), (0.98, RED)],
        limits=(0, 1),
    ),
    Panel(
        "KV cache free but cached",
        "Share of KV blocks that are free and still hold a cached prefix.",
        "percentunit",
        [("{{replica}}", f"max by (replica) ({engine('kv_cache_cached_ratio')})")],
        limits=(0, 1),
    ),
    Panel(
        "Prefix cache hit rate",
        "Share of prompt tokens served from the prefix cache, in total and by replica.",
        "percentunit",
        [
            ("all", hit_ratio()),
            (
                "{{replica}}",
                f"{rate(engine('prefix_cache_hit_tokens_total'), 'replica')} / "
                f"{rate(engine('prefix_cache_query_tokens_total'), 'replica')}",
            ),
        ],
        limits=(0, 1),
        colours={"all": BLUE},
    ),
    Panel(
        "KV blocks by state",
        "Blocks of all selected replicas: used by sequences, free but cached, and free.",
        "none",
        [("{{state}}", f"sum by (state) ({engine('kv_blocks', EACH_BLOCK_ONCE)})")],
        stacked=True,
        decimals=0,
        colours={"used": ORANGE, "cached": GREEN, "free": BLUE},
    ),
    Panel(
        "Evictions",
        "Cached blocks evicted per second, by replica. A high rate means that prefixes still in use are lost.",
        "suffix: blocks/s",
        [("{{replica}}", rate(engine("blocks_evicted_total"), "replica"))],
    ),
    Panel(
        "Preemptions",
        "Sequences that lost their blocks: swapped to host memory, or recomputed later.",
        "ops",
        [("{{kind}}", rate(engine("preemptions_total"), "kind"))],
        stacked=True,
        colours={"swap": YELLOW, "recompute": RED},
    ),
]
