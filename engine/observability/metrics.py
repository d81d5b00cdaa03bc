"""Every metric of the engine, defined once, and the bookkeeping that turns steps into observations.

Names and meanings follow vLLM's. Where the numbers go is a sink's business: the deployment binds one to Prometheus and
to Ray's metrics agent, the offline API to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol

from engine.kv.block_manager import BlockManager
from engine.outputs import FinishReason, RequestTiming
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["METRICS", "EngineMetrics", "Metric", "MetricSink", "NullSink"]

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
    """One metric: its name without prefix or suffix, what it says, and how it may be split."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()  # label values that are shown, with 0, before they have happened


REQUESTS_RUNNING = Metric("num_requests_running", "gauge", "Sequences in the running batch.")
REQUESTS_WAITING = Metric("num_requests_waiting", "gauge", "Sequences waiting for a place in the batch.")
REQUESTS_SWAPPED = Metric("num_requests_swapped", "gauge", "Requests preempted to the host pool.")
KV_USAGE = Metric("kv_cache_usage_ratio", "gauge", "Share of KV blocks in use by sequences, 0 to 1.")
KV_CACHED = Metric("kv_cache_cached_ratio", "gauge", "Share of KV blocks free but still holding a cached prefix.")
KV_BLOCKS = Metric("kv_blocks", "gauge", "KV blocks by state; shared is a part of used.", ("state",))
ENGINE_INFO = Metric(
    "engine_info",
    "gauge",
    "Always 1; the labels describe the engine.",
    ("model", "block_size", "num_blocks", "attention_backend", "dtype"),
)
CACHE_QUERIES = Metric("prefix_cache_query_tokens", "counter", "Prompt tokens looked up in the prefix cache.")
CACHE_HITS = Metric("prefix_cache_hit_tokens", "counter", "Prompt tokens that the prefix cache served.")
ENGINE_START_TIME = Metric(
    "engine_start_time_seconds",
    "gauge",
    "When this engine was ready, in seconds since 1970; a replica that is restarted comes back under another name.",
)
PREEMPTIONS = Metric(
    "preemptions", "counter", "Sequences preempted for want of KV blocks.", ("kind",), known=(("swap",), ("recompute",))
)
PROMPT_TOKENS = Metric("prompt_tokens", "counter", "Prompt tokens of requests that were started.")
GENERATION_TOKENS = Metric("generation_tokens", "counter", "Tokens generated.")
REQUESTS_FINISHED = Metric(
    "requests_finished",
    "counter",
    "Requests that ended, by reason; abort: the client went away.",
    ("reason",),
    known=(("stop",), ("length",), ("abort",), ("error",)),
)
REQUESTS_REJECTED = Metric(
    "requests_rejected",
    "counter",
    "Requests refused by the engine: overloaded, or the parameter that was wrong.",
    ("reason",),
    known=(("overloaded",), ("prompt",)),
)
BLOCKS_EVICTED = Metric("blocks_evicted", "counter", "Cached KV blocks that were overwritten.")
TTFT = Metric("time_to_first_token_seconds", "histogram", "From arrival to the first token.", (), TTFT_BUCKETS)
INTER_TOKEN = Metric(
    "inter_token_latency_seconds", "histogram", "Between two tokens of a request.", (), INTER_TOKEN_BUCKETS
)
E2E_LATENCY = Metric("e2e_request_latency_seconds", "histogram", "From arrival to the last token.", (), LATENCY_BUCKETS)
QUEUE_TIME = Metric("request_queue_seconds", "histogram", "From arrival to the first step.", (), LATENCY_BUCKETS)
PREFILL_TIME = Metric(
    "request_prefill_seconds", "histogram", "From the first step to the first token.", (), LATENCY_BUCKETS
)
DECODE_TIME = Metric(
    "request_decode_seconds", "histogram", "From the first token to the last one.", (), LATENCY_BUCKETS
)
REQUEST_PROMPT = Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", (), TOKEN_BUCKETS)
REQUEST_GENERATION = Metric(
    "request_generation_tokens", "histogram", "Tokens generated for a request.", (), TOKEN_BUCKETS
)
DRAFT_TOKENS = Metric("spec_decode_num_draft_tokens", "counter", "Tokens guessed and computed before they were known.")
ACCEPTED_TOKENS = Metric("spec_decode_num_accepted_tokens", "counter", "Tokens that were gained by right guesses.")
STEP_SECONDS = Metric(
    "step_seconds",
    "histogram",
    "Time of one engine step, by phase.",
    ("phase",),
    STEP_BUCKETS,
    (("schedule",), ("forward",), ("sample",)),
)
STEP_TOKENS = Metric("step_tokens", "histogram", "Tokens computed in one engine step.", (), TOKEN_BUCKETS)

OVERLOADED = "overloaded"  # the reason of REQUESTS_REJECTED where the queue was full

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class MetricSink(Protocol):
    """Where numbers go. Called from the engine's thread several times a step: cheap and thread-safe."""

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add a positive amount to a counter."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Record a value in a histogram, ``count`` times."""


class NullSink:
    """Keeps nothing."""

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Ignore it."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Ignore it."""

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Ignore it."""


@dataclass(slots=True)
class _RequestTimes:
    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def timing(self) -> RequestTiming:
        """What is told with the first token and with the last one."""
        decode_s = max(0.0, self.last_token - self.first_token)
        return RequestTiming(self.started - self.arrived, self.first_token - self.started, decode_s)


class EngineMetrics:
    """Follows the requests of one engine and reports to a sink. Times are monotonic seconds."""

    def __init__(self, sink: MetricSink, block_manager: BlockManager, scheduler: Scheduler) -> None:
        self._sink = sink
        self._block_manager = block_manager
        self._scheduler = scheduler
        self._times: dict[str, _RequestTimes] = {}
        self._num_evicted = 0

    def request_added(self, group: SequenceGroup) -> None:
        """A request has entered the queue."""
        self._times[group.request_id] = _RequestTimes(arrived=monotonic())

    def request_rejected(self, reason: str) -> None:
        """A request was refused at the door."""
        self._sink.increment(REQUESTS_REJECTED, reason=reason)

    def request_shed(self, group: SequenceGroup) -> None:
        """A request that had not begun gave way to one of higher priority: it counts as refused."""
        del self._times[group.request_id]
        self.request_rejected(OVERLOADED)

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """A batch was chosen."""
        now = monotonic()
        for group in output.admitted:
            if group.num_preemptions:
                continue
            times, first = self._times[group.request_id], group.sequences[0]
            times.started = now
            self._sink.observe(QUEUE_TIME, now - times.arrived)
            self._sink.increment(PROMPT_TOKENS, first.num_prompt_tokens)
            self._sink.increment(CACHE_QUERIES, first.num_prompt_tokens)
            if first.num_cached_tokens:
                self._sink.increment(CACHE_HITS, first.num_cached_tokens)
        for group in output.preempted:
            kind = "swap" if group.status is SequenceStatus.SWAPPED else "recompute"
            self._sink.increment(PREEMPTIONS, kind=kind)

    def step_finished(self, output: SchedulerOutput, got_token: Iterable[Sequence], times: StepTimes) -> None:
        """A batch was computed, and these sequences got a token each, more by a draft, or ended without one."""
        now = monotonic()
        intervals: Counter[float] = Counter()  # nearly all streams got their last token in one step, the one before
        for sequence in got_token:
            self._token_generated(sequence, now, intervals)
        for seconds, count in intervals.items():
            self._sink.observe(INTER_TOKEN, seconds, count)
        if generated := sum(not sequence.has_failed for sequence in output.sampling):
            self._sink.increment(GENERATION_TOKENS, generated)
        if output.drafts:
            self._report_drafts(output)
        self._sink.observe(STEP_TOKENS, output.num_tokens)
        self._sink.observe(STEP_SECONDS, times.schedule, phase="schedule")
        self._sink.observe(STEP_SECONDS, times.forward, phase="forward")
        self._sink.observe(STEP_SECONDS, times.sample, phase="sample")
        self.report_state()

    def _report_drafts(self, output: SchedulerOutput) -> None:
        self._sink.increment(DRAFT_TOKENS, output.num_draft_tokens)
        if accepted := sum(output.num_accepted.values()):
            self._sink.increment(ACCEPTED_TOKENS, accepted)
            self._sink.increment(GENERATION_TOKENS, accepted)

    def report_state(self) -> None:
        """Report the gauges: sequences and blocks by state."""
        counts = self._block_manager.pool.counts()
        total = len(self._block_manager.pool.blocks)
        self._sink.set(REQUESTS_RUNNING, len(self._scheduler.running))
        self._sink.set(REQUESTS_WAITING, len(self._scheduler.waiting) - self._scheduler.num_swapped)
        self._sink.set(REQUESTS_SWAPPED, self._scheduler.num_swapped)
        self._sink.set(KV_USAGE, counts.used / total)
        self._sink.set(KV_CACHED, counts.cached / total)
        for state in ("free", "cached", "used", "shared"):
            self._sink.set(KV_BLOCKS, getattr(counts, state), state=state)
        if evicted := self._block_manager.prefix_cache.num_evicted - self._num_evicted:
            self._sink.increment(BLOCKS_EVICTED, evicted)
            self._num_evicted += evicted

    def _token_generated(self, sequence: Sequence, now: float, intervals: Counter[float]) -> None:
        times = self._times.get(sequence.request_id)
        if times is None:  # another answer of the request was its last
            return
        if not times.first_token:
            times.first_token = now
            self._sink.observe(TTFT, now - times.arrived)
            self._sink.observe(PREFILL_TIME, now - times.started)
            sequence.group.timing = times.timing
        elif times.last_token < now:  # else this step's token of another answer was counted
            intervals[now - times.last_token] += 1
        times.last_token = now
        if sequence.is_finished and sequence.group.is_finished:
            self.request_finished(sequence.group)

    def request_finished(self, group: SequenceGroup) -> None:
        """A request has ended, by itself or from outside."""
        reason = group.sequences[0].finish_reason
        assert reason is not None
        times = self._times.pop(group.request_id)
        num_generated = sum(sequence.num_output_tokens for sequence in group.sequences)
        has_failed = reason is FinishReason.ABORT and group.sequences[0].has_failed
        self._sink.increment(REQUESTS_FINISHED, reason="error" if has_failed else reason.value)
        self._sink.observe(REQUEST_PROMPT, group.sequences[0].num_prompt_tokens)
        self._sink.observe(REQUEST_GENERATION, num_generated)
        if times.first_token:  # what a resumed request has generated came from elsewhere
            self._sink.observe(E2E_LATENCY, times.last_token - times.arrived)
            self._sink.observe(DECODE_TIME, times.last_token - times.first_token)
            group.timing = times.timing
