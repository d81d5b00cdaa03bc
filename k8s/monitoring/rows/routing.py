"""Routing: why replicas are chosen, what the index predicts, and how evenly requests are spread."""

from __future__ import annotations

from k8s.monitoring.panels import BLUE, GREEN, ORANGE, PURPLE, QUANTILE_COLOURS, RED, TOKENS_PER_SECOND, YELLOW, Panel
from k8s.monitoring.promql import engine, imbalance, ingress, quantile, rate, rate_or_zero

__all__ = ["ROUTING"]

# Running and waiting sequences of each replica.
REQUESTS_PER_REPLICA = (
    f"(sum by (replica) ({engine('num_requests_running')}) + sum by (replica) ({engine('num_requests_waiting')}))"
)

ROUTING = [
    Panel(
        "Why a replica was chosen",
        "hit: it has the longest cached prefix; cold: no replica has any; balanced: another "
        "replica has more, but is busier; fallback: by load alone; retry: the first choice was lost or full.",
        "reqps",
        [("{{outcome}}", rate(ingress("routing_decisions_total"), "outcome"))],
        stacked=True,
        width=6,
        colours={"hit": GREEN, "cold": BLUE, "balanced": YELLOW, "fallback": ORANGE, "retry": RED},
    ),
    Panel(
        "Cache hits: possible, expected, real",
        "Prompt tokens per second that the index shows for the best replica, that it "
        "shows for the chosen replica, and that the chosen replica's cache served. Expected far above real: the index "
        "is lagging.",
        TOKENS_PER_SECOND,
        [
            ("possible", rate_or_zero(ingress("routing_best_hit_tokens_total"))),
            ("expected", rate_or_zero(ingress("routing_predicted_hit_tokens_total"))),
            ("real", rate_or_zero(engine("prefix_cache_hit_tokens_total"))),
        ],
        width=6,
        colours={"possible": BLUE, "expected": YELLOW, "real": GREEN},
    ),
    Panel(
        "Imbalance",
        "The busiest replica over the mean, by computed tokens and by running and waiting requests; "
        "1 is even. Meaningless at very low load.",
        "none",
        [
            ("computed tokens", imbalance(rate(engine("step_tokens_sum"), "replica"))),
            ("requests", imbalance(REQUESTS_PER_REPLICA)),
        ],
        width=6,
        thresholds=[(2, YELLOW)],
        limits=(1, None),
        decimals=2,
        colours={"computed tokens": BLUE},
    ),
    Panel(
        "Index lag",
        "Time from an engine's step until an ingress receives its KV events.",
        "s",
        [(f"p{share * 100:.0f}", quantile(share, "kv_index_lag_seconds", ingress)) for share in (0.5, 0.99)],
        width=6,
        thresholds=[(1, YELLOW)],
        colours=QUANTILE_COLOURS,
    ),
    Panel(
        "Events lost and requests moved",
        "Gaps in an engine's KV events (the ingress requests a snapshot), rejected "
        "messages, and requests that continued at another replica after theirs was lost. A broken connection to a live "
        "engine and a gap in its messages cost time only: what is missing is sent again.",
        "ops",
        [
            ("gaps", rate_or_zero(ingress("kv_index_gaps_total"))),
            ("rejected messages", rate_or_zero(ingress("kv_index_dropped_messages_total"))),
            ("migrations", rate_or_zero(ingress("request_migrations_total"))),
            ("reconnections", rate_or_zero(ingress("channel_reconnections_total"))),
            ("gaps in the channel", rate_or_zero(ingress("channel_gaps_total"))),
        ],
        colours={"gaps": ORANGE, "rejected messages": RED, "migrations": PURPLE, "reconnections": YELLOW},
    ),
    Panel(
        "First tokens: expected, real",
        "Time from the dispatch of a request to its first token: as the router expected it from queue, fetch and "
        "prefill, and as it was, of the same answers. Real far above expected: the engines' reports are old, or their "
        "machines do other work.",
        "s",
        [
            (f"{name} p{share * 100:.0f}", quantile(share, f"routing_{kind}_ttft_seconds", ingress))
            for name, kind in (("expected", "predicted"), ("real", "measured"))
            for share in (0.5, 0.9)
        ],
        colours={"expected p50": YELLOW, "expected p90": ORANGE, "real p50": GREEN, "real p90": BLUE},
    ),
    Panel(
        "Time of a decision",
        "Seconds to rank the replicas for one request.",
        "s",
        [(f"p{share * 100:.0f}", quantile(share, "routing_decision_seconds", ingress)) for share in (0.5, 0.99)],
        colours=QUANTILE_COLOURS,
    ),
]
