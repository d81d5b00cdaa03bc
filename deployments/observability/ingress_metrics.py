"""Every metric of the ingress, defined once, and the recorder that keeps their values.

Metrics of the engine are defined in engine/observability/metrics.py. To add a metric of the ingress:

1. Define it below as a module constant and name it in ``__all__``; INGRESS_METRICS and the exporters find it.
2. Record it where it happens, with ``increment``, ``set`` or ``observe`` of ``ingress_recorder()``.
3. Run ``python -m k8s.monitoring.metrics_table``, which writes the table of k8s/monitoring/README.md.
4. Optional: add a panel to a row of k8s/monitoring/rows and run ``python -m k8s.monitoring.dashboard``.
"""

from __future__ import annotations

from functools import cache

from deployments.observability.recorder import Recorder
from engine.observability.metrics import TTFT_BUCKETS, Metric

__all__ = [
    "BATCHES",
    "BATCH_LINES",
    "BATCH_PAUSES",
    "CHANNEL_GAPS",
    "CHANNEL_LOST_REPLICAS",
    "CHANNEL_RECONNECTIONS",
    "HTTP_REQUESTS",
    "INGRESS_INFO",
    "INGRESS_METRICS",
    "INGRESS_REJECTIONS",
    "KV_INDEX_BLOCKS",
    "KV_INDEX_DROPPED",
    "KV_INDEX_GAPS",
    "KV_INDEX_LAG",
    "REPLICAS",
    "REPLICAS_MIN",
    "REQUEST_HANDOVERS",
    "REQUEST_MIGRATIONS",
    "ROUTING_BEST_HIT_TOKENS",
    "ROUTING_DECISIONS",
    "ROUTING_DECISION_SECONDS",
    "ROUTING_FETCHED_TOKENS",
    "ROUTING_MEASURED_TTFT",
    "ROUTING_PREDICTED_FETCH_TOKENS",
    "ROUTING_PREDICTED_HIT_TOKENS",
    "ROUTING_PREDICTED_TTFT",
    "STREAM_PAUSES",
    "ingress_recorder",
]

LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)

HTTP_REQUESTS = Metric("http_requests", "counter", "HTTP requests answered.", ("path", "status"))
INGRESS_INFO = Metric("ingress_info", "gauge", "Always 1; the labels describe the ingress.", ("model",))
ROUTING_DECISIONS = Metric(
    "routing_decisions",
    "counter",
    "Routing decisions, by the reason for the first choice.",
    ("outcome",),
    known=(("hit",), ("cold",), ("balanced",), ("fallback",), ("retry",)),
)
ROUTING_DECISION_SECONDS = Metric(
    "routing_decision_seconds", "histogram", "Time to rank the replicas for one request.", (), DECISION_BUCKETS
)
ROUTING_PREDICTED_HIT_TOKENS = Metric(
    "routing_predicted_hit_tokens", "counter", "Prompt tokens predicted to be cached on the chosen replicas."
)
ROUTING_BEST_HIT_TOKENS = Metric(
    "routing_best_hit_tokens",
    "counter",
    "Prompt tokens predicted to be cached on the best replica for each.",
)
ROUTING_PREDICTED_TTFT = Metric(
    "routing_predicted_ttft_seconds",
    "histogram",
    "Time that the router expected from the dispatch of a request to its first token: queue, fetch and prefill.",
    (),
    TTFT_BUCKETS,
)
ROUTING_MEASURED_TTFT = Metric(
    "routing_measured_ttft_seconds",
    "histogram",
    "Time from the dispatch of the same requests to their first tokens, as they reached the ingress.",
    (),
    TTFT_BUCKETS,
)
ROUTING_PREDICTED_FETCH_TOKENS = Metric(
    "routing_predicted_fetch_tokens",
    "counter",
    "Prompt tokens that the chosen replicas were expected to fetch, by source.",
    ("source",),
    known=(("disk",), ("shared",), ("peer",)),
)
ROUTING_FETCHED_TOKENS = Metric(
    "routing_fetched_tokens",
    "counter",
    "Of those, the prompt tokens that the replicas did not compute.",
    ("source",),
    known=(("disk",), ("shared",), ("peer",)),
)
INGRESS_REJECTIONS = Metric(
    "ingress_rejections",
    "counter",
    "Requests rejected before they reached an engine.",
    ("reason",),
    known=(("overloaded",),),
)
KV_INDEX_BLOCKS = Metric("kv_index_blocks", "gauge", "KV blocks in the routing index of this ingress.")
KV_INDEX_LAG = Metric(
    "kv_index_lag_seconds", "histogram", "Time from an engine's step to the arrival of its KV events.", (), LAG_BUCKETS
)
KV_INDEX_GAPS = Metric("kv_index_gaps", "counter", "Gaps in the KV events, each followed by a snapshot request.")
KV_INDEX_DROPPED = Metric(
    "kv_index_dropped_messages",
    "counter",
    "KV messages and endpoints that were dropped as invalid.",
    ("reason",),
    known=(("malformed",), ("oversized",)),
)
REQUEST_MIGRATIONS = Metric("request_migrations", "counter", "Requests moved to another replica after theirs was lost.")
REQUEST_HANDOVERS = Metric(
    "request_handovers", "counter", "Requests that a replica handed over to another one before it ended."
)
CHANNEL_RECONNECTIONS = Metric(
    "channel_reconnections", "counter", "Connections to live engine replicas that broke and were made again."
)
CHANNEL_GAPS = Metric(
    "channel_gaps",
    "counter",
    "Gaps in the messages between ingress and engines, each followed by a resend, by what they carry.",
    ("content",),
    known=(("requests",), ("outputs",)),
)
CHANNEL_LOST_REPLICAS = Metric(
    "channel_lost_replicas", "counter", "Engine replicas lost while they had requests of this ingress."
)
STREAM_PAUSES = Metric(
    "stream_pauses",
    "counter",
    "Requests aborted because their client reads too slowly; they continue when it has read what there is.",
)
BATCHES = Metric("batches", "gauge", "Batches that have not ended, at the ingress that runs them.", ("state",))
BATCH_LINES = Metric(
    "batch_lines",
    "counter",
    "Lines of batches with a durable result.",
    ("outcome",),
    known=(("completed",), ("failed",)),
)
BATCH_PAUSES = Metric(
    "batch_pauses", "counter", "Requests of batches aborted to make room for others; they continue when there is room."
)
REPLICAS = Metric("replicas", "gauge", "Engine replicas known to this ingress.", ("state",))
REPLICAS_MIN = Metric("replicas_min", "gauge", "Configured minimum number of engine replicas.")

INGRESS_METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@cache
def ingress_recorder() -> Recorder:
    """Return the recorder of this ingress process, which its router shares."""
    return Recorder(INGRESS_METRICS)
