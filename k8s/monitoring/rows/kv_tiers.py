"""The tiers of the KV cache: what host memory, storage and other replicas hold, give and take."""

from __future__ import annotations

from k8s.monitoring.panels import TOKENS_PER_SECOND, Panel
from k8s.monitoring.promql import engine, ingress, rate

__all__ = ["KV_TIERS"]

QUERIES = rate(engine("prefix_cache_query_tokens_total"))
WAITS = rate(engine("kv_tier_fetch_seconds_bucket"), "tier, le")
PREDICTED, FETCHED = (
    rate(ingress(f"routing_{what}_tokens_total"), "source") for what in ("predicted_fetch", "fetched")
)

KV_TIERS = [
    Panel(
        "Hit rate by tier",
        "Share of prompt tokens that were loaded from host memory, and of those that had come from storage or a peer.",
        "percentunit",
        [("{{tier}}", f"{rate(engine('prefix_cache_tier_hit_tokens_total'), 'tier')} / on() group_left() {QUERIES}")],
        limits=(0, 1),
    ),
    Panel(
        "Tokens by tier",
        "Tokens per second whose KV came from a tier (in) or went to it (out).",
        TOKENS_PER_SECOND,
        [("{{tier}} {{direction}}", rate(engine("kv_tier_tokens_total"), "tier, direction"))],
    ),
    Panel(
        "Bytes by tier",
        "Bytes of KV per second that came from a tier (in) or went to it (out).",
        "Bps",
        [("{{tier}} {{direction}}", rate(engine("kv_tier_bytes_total"), "tier, direction"))],
    ),
    Panel(
        "Blocks by tier",
        "Share of the blocks that a tier has room for which it holds, by replica.",
        "percentunit",
        [
            (
                "{{replica}} {{tier}}",
                f"max by (replica, tier) ({engine('kv_tier_blocks')}) / "
                f"max by (replica, tier) ({engine('kv_tier_capacity_blocks')})",
            )
        ],
        limits=(0, 1),
    ),
    Panel(
        "Wait for a tier",
        "Time that requests waited for KV from storage or a peer: median and 99th percentile.",
        "s",
        [(f"{{{{tier}}}} p{100 * share:.0f}", f"histogram_quantile({share}, {WAITS})") for share in (0.5, 0.99)],
    ),
    Panel(
        "Failed fetches and saves",
        "What did not come from a tier, or did not go there, by reason. It is computed again.",
        "ops",
        [("{{tier}} {{reason}}", rate(engine("kv_tier_failures_total"), "tier, reason"))],
        stacked=True,
    ),
    Panel(
        "Predicted and fetched tokens",
        "Prompt tokens per second that the router expected replicas to fetch, and those that came, by source.",
        TOKENS_PER_SECOND,
        [("{{source}} predicted", PREDICTED), ("{{source}} fetched", FETCHED)],
        width=12,
    ),
    Panel(
        "Leases",
        "Runs of blocks that host memory lends to storage or to other replicas, by replica.",
        "none",
        [("{{replica}}", f"max by (replica) ({engine('kv_tier_leases')})")],
        decimals=0,
        width=12,
    ),
]
