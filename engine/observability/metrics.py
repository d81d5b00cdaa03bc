"""Every metric of the engine, defined once, and the interface of the sinks that the numbers go to.

Names and meanings follow vLLM's. A deployment's sink writes to Prometheus and to Ray's metrics agent; the offline API
has none. To add a metric:

1. Define it below as a module constant; METRICS and the exporters find it.
2. Record it in engine_metrics.py, in the method of the event that it belongs to, with ``self._sink.increment``, ``set``
   or ``observe``. Only if no event fits, add one to both classes of observer.py and call it in engine/engine.py.
3. Run ``python -m k8s.monitoring.metrics_table``, which writes the table of k8s/monitoring/README.md.
4. Optional: add a panel to a row of k8s/monitoring/rows and run ``python -m k8s.monitoring.dashboard``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["METRICS", "Metric", "MetricSink", "NullSink"]

Kind = Literal["counter", "gauge", "histogram"]

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
LATENCY_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix ``pagoda_`` and the suffix of its kind.
        kind: of the Prometheus metric.
        help: the text of the metric's HELP line.
        labels: names of its labels.
        buckets: upper bounds of a histogram's buckets.
        known: label values that are exported as 0 before they first occur.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()


REQUESTS_RUNNING = Metric("num_requests_running", "gauge", "Sequences in the running batch.")
REQUESTS_WAITING = Metric("num_requests_waiting", "gauge", "Requests waiting for a slot in the batch.")
REQUESTS_SWAPPED = Metric("num_requests_swapped", "gauge", "Requests preempted to the host pool.")
KV_USAGE = Metric("kv_cache_usage_ratio", "gauge", "Share of KV blocks in use by sequences, 0 to 1.")
KV_CACHED = Metric("kv_cache_cached_ratio", "gauge", "Share of KV blocks free but still holding a cached prefix.")
KV_BLOCKS = Metric("kv_blocks", "gauge", "KV blocks by state; the used blocks include the shared ones.", ("state",))
WINDOW_PAGES = Metric(
    "window_pages",
    "gauge",
    "Pages of layers with a sliding window or chunks, by its tokens and by state.",
    ("window", "state"),
)
STATE_SLOTS = Metric(
    "state_slots", "gauge", "States of recurrent layers: used by sequences, kept as snapshots, or free.", ("state",)
)
ENGINE_INFO = Metric(
    "engine_info",
    "gauge",
    "Always 1; the labels describe the engine.",
    ("model", "block_size", "num_blocks", "attention_backend", "dtype", "kv_cache_dtype", "task"),
)
CACHE_QUERIES = Metric("prefix_cache_query_tokens", "counter", "Prompt tokens looked up in the prefix cache.")
CACHE_HITS = Metric("prefix_cache_hit_tokens", "counter", "Prompt tokens found in the prefix cache.")
ENGINE_START_TIME = Metric(
    "engine_start_time_seconds",
    "gauge",
    "Unix time at which this engine became ready, in seconds; a restarted replica has a new name.",
)
PREEMPTIONS = Metric(
    "preemptions",
    "counter",
    "Requests preempted because no KV block was free.",
    ("kind",),
    known=(("swap",), ("recompute",)),
)
PROMPT_TOKENS = Metric("prompt_tokens", "counter", "Prompt tokens of requests that have started to run.")
GENERATION_TOKENS = Metric("generation_tokens", "counter", "Tokens generated.")
REQUESTS_FINISHED = Metric(
    "requests_finished",
    "counter",
    "Requests that ended, by reason; abort: the client disconnected.",
    ("reason",),
    known=(("stop",), ("length",), ("abort",), ("error",)),
)
REQUESTS_REJECTED = Metric(
    "requests_rejected",
    "counter",
    "Requests rejected by the engine, by reason: overloaded, or the name of the invalid parameter.",
    ("reason",),
    known=(("overloaded",), ("prompt",)),
)
PEER_REJECTIONS = Metric(
    "kv_peer_rejections",
    "counter",
    "Connections of other replicas, for KV pages, that this replica has ended, by reason.",
    ("reason",),
    known=(("secret",), ("refused",), ("malformed",), ("stalled",), ("connections",)),
)
BLOCKS_EVICTED = Metric("blocks_evicted", "counter", "Cached KV blocks that were evicted.")
TTFT = Metric("time_to_first_token_seconds", "histogram", "Time from arrival to the first token.", (), TTFT_BUCKETS)
INTER_TOKEN = Metric(
    "inter_token_latency_seconds", "histogram", "Time between two tokens of a request.", (), INTER_TOKEN_BUCKETS
)
E2E_LATENCY = Metric(
    "e2e_request_latency_seconds", "histogram", "Time from arrival to the last token.", (), LATENCY_BUCKETS
)
QUEUE_TIME = Metric("request_queue_seconds", "histogram", "Time from arrival to the first step.", (), LATENCY_BUCKETS)
PREFILL_TIME = Metric(
    "request_prefill_seconds", "histogram", "Time from the first step to the first token.", (), LATENCY_BUCKETS
)
DECODE_TIME = Metric(
    "request_decode_seconds", "histogram", "Time from the first token to the last one.", (), LATENCY_BUCKETS
)
REQUEST_PROMPT = Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", (), TOKEN_BUCKETS)
REQUEST_GENERATION = Metric(
    "request_generation_tokens", "histogram", "Tokens generated for a request.", (), TOKEN_BUCKETS
)
_DRAFTERS = (("prediction",), ("ngram",), ("suffix",), ("draft_model",), ("mtp",), ("eagle3",))
DRAFTS = Metric(
    "spec_decode_num_drafts",
    "counter",
    "Drafts of speculative decoding, one for each sequence and step that has one, by drafter.",
    ("drafter",),
    known=_DRAFTERS,
)
DRAFT_TOKENS = Metric(
    "spec_decode_num_draft_tokens",
    "counter",
    "Draft tokens proposed by speculative decoding, by drafter.",
    ("drafter",),
    known=_DRAFTERS,
)
ACCEPTED_TOKENS = Metric(
    "spec_decode_num_accepted_tokens",
    "counter",
    "Draft tokens that were accepted, by drafter.",
    ("drafter",),
    known=_DRAFTERS,
)
DRAFTED_AT = Metric(
    "spec_decode_num_draft_tokens_per_pos",
    "counter",
    "Draft tokens by drafter and position in the draft, from 1: those from 9 and from 17 on are counted together.",
    ("drafter", "position"),
)
ACCEPTED_AT = Metric(
    "spec_decode_num_accepted_tokens_per_pos",
    "counter",
    "Draft tokens that were accepted, by drafter and position in the draft, as spec_decode_num_draft_tokens_per_pos.",
    ("drafter", "position"),
)
EMITTED_TOKENS = Metric(
    "spec_decode_num_emitted_tokens",
    "counter",
    "Tokens that sequences got in steps with a draft: the accepted ones, and one more for each draft; by drafter.",
    ("drafter",),
    known=_DRAFTERS,
)
SAVED_STEPS = Metric(
    "spec_decode_saved_steps",
    "counter",
    "Further steps that would have given the same tokens: of each step the most tokens accepted for a sequence.",
    (),
)
DRAFTING_SECONDS = Metric(
    "spec_decode_drafting_seconds",
    "counter",
    "Time in which drafts were made, or looked for and not found, by drafter.",
    ("drafter",),
    known=_DRAFTERS,
)
STEP_SECONDS = Metric(
    "step_seconds",
    "histogram",
    "Time of one engine step, by phase; draft is that of a draft model, if there is one.",
    ("phase",),
    STEP_BUCKETS,
    (("schedule",), ("forward",), ("sample",)),
)
STEP_TOKENS = Metric("step_tokens", "histogram", "Tokens computed in one engine step.", (), TOKEN_BUCKETS)

# What moves between host memory and other places, and what the prefix cache serves from there.
_TIERS = ("disk", "shared", "peer")
_MOVES = tuple((tier, direction) for tier in ("host", *_TIERS) for direction in ("in", "out"))
TIER_TOKENS = Metric(
    "kv_tier_tokens",
    "counter",
    "Tokens whose KV came from a tier (in) or went to it (out); on the host, those of preempted requests too.",
    ("tier", "direction"),
    known=_MOVES,
)
TIER_BYTES = Metric(
    "kv_tier_bytes",
    "counter",
    "Bytes of KV that came from a tier (in) or went to it (out).",
    ("tier", "direction"),
    known=_MOVES,
)
TIER_HITS = Metric(
    "prefix_cache_tier_hit_tokens",
    "counter",
    "Cached tokens that were loaded from host memory, and those among them that had come from storage or a peer.",
    ("tier",),
    known=tuple((tier,) for tier in ("host", *_TIERS)),
)
KV_COPIED_TOKENS = Metric(
    "kv_copied_tokens",
    "counter",
    "Tokens whose KV was read from another replica before a request needed it, because that one may be lost, ends, or "
    "because this one is new.",
    ("reason",),
    known=(("replication",), ("drain",), ("warm_up",)),
)
RESUMED_TOKENS = Metric(
    "resumed_tokens",
    "counter",
    "Tokens of requests that another engine had begun: those whose KV was restored, and those computed again.",
    ("kv",),
    known=(("restored",), ("recomputed",)),
)
TIER_FETCH_SECONDS = Metric(
    "kv_tier_fetch_seconds",
    "histogram",
    "Time that a request waited for KV from a tier.",
    ("tier",),
    LATENCY_BUCKETS,
    tuple((tier,) for tier in _TIERS),
)
TIER_FAILURES = Metric(
    "kv_tier_failures",
    "counter",
    "Fetches from a tier, or saves to it, that failed, by reason; what is lost is computed again.",
    ("tier", "reason"),
    known=tuple((tier, reason) for tier in _TIERS for reason in ("checksum", "io", "late")),
)
TIER_BLOCKS = Metric("kv_tier_blocks", "gauge", "Blocks of KV that a tier holds for this model.", ("tier",))
TIER_CAPACITY = Metric("kv_tier_capacity_blocks", "gauge", "Blocks of KV that a tier has room for.", ("tier",))
TIER_LEASES = Metric(
    "kv_tier_leases", "gauge", "Runs of blocks in host memory that are lent to storage or to another replica now."
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class MetricSink(Protocol):
    """Stores the values of metrics. The step thread calls it several times a step: it is cheap, and thread-safe."""

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add a positive amount to a counter."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Record a value in a histogram, ``count`` times."""


class NullSink:
    """Discards every value."""

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Discard the value."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Discard the value."""

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Discard the value."""
