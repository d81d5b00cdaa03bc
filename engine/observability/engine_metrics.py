"""EngineMetrics: computes the values of the metrics from the events of an engine.

metrics.py defines the metrics; a MetricSink stores the values.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic

from engine.errors import OverloadedError, RequestError
from engine.kv.block_manager import BlockManager
from engine.observability.metrics import (
    ACCEPTED_AT,
    ACCEPTED_TOKENS,
    BLOCKS_EVICTED,
    CACHE_HITS,
    CACHE_QUERIES,
    DECODE_TIME,
    DRAFT_TOKENS,
    DRAFTED_AT,
    DRAFTING_SECONDS,
    DRAFTS,
    E2E_LATENCY,
    EMITTED_TOKENS,
    ENGINE_INFO,
    ENGINE_START_TIME,
    GENERATION_TOKENS,
    INTER_TOKEN,
    KV_BLOCKS,
    KV_CACHED,
    KV_USAGE,
    PREEMPTIONS,
    PREFILL_TIME,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_GENERATION,
    REQUEST_PROMPT,
    REQUESTS_FINISHED,
    REQUESTS_REJECTED,
    REQUESTS_RUNNING,
    REQUESTS_SWAPPED,
    REQUESTS_WAITING,
    RESUMED_TOKENS,
    SAVED_STEPS,
    STATE_SLOTS,
    STEP_SECONDS,
    STEP_TOKENS,
    TIER_BLOCKS,
    TIER_HITS,
    TTFT,
    WINDOW_PAGES,
    MetricSink,
)
from engine.observability.observer import EngineObserver
from engine.options.speculative_config import MAX_DRAFT_TOKENS
from engine.outputs import FinishReason, RequestTiming
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = ["EngineMetrics"]

# Of a draft token, by its index.
_POSITIONS = [*map(str, range(1, 9)), *["9-16"] * 8, *["17+"] * (MAX_DRAFT_TOKENS - 16)]


@dataclass(slots=True)
class _RequestTimes:
    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def timing(self) -> RequestTiming:
        """The times so far, as outputs carry them."""
        decode_s = max(0.0, self.last_token - self.first_token)
        return RequestTiming(self.started - self.arrived, self.first_token - self.started, decode_s)


class EngineMetrics(EngineObserver):
    """Measures the requests and steps of one engine, reports to a sink, and sets each request's ``timing``.

    Times are monotonic seconds.
    """

    def __init__(self, sink: MetricSink, block_manager: BlockManager, scheduler: Scheduler) -> None:
        self._sink = sink
        self._block_manager = block_manager
        self._scheduler = scheduler
        self._times: dict[str, _RequestTimes] = {}
        self._num_evicted = self._num_loaded = 0

    def report_start(self, **labels: str) -> None:
        """Report that the engine is ready, with the labels of ``ENGINE_INFO``, and the first values of the gauges."""
        self._sink.set(ENGINE_INFO, 1, **labels)
        self._sink.set(ENGINE_START_TIME, time.time())
        self.state_changed()

    def request_rejected(self, error: RequestError) -> None:
        is_overload = isinstance(error, OverloadedError)
        self._sink.increment(REQUESTS_REJECTED, reason=error.param or ("overloaded" if is_overload else "invalid"))

    def request_added(self, group: SequenceGroup, arrived: float) -> None:
        self._times[group.request_id] = _RequestTimes(arrived=arrived)

    def step_scheduled(self, output: SchedulerOutput) -> None:
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
            if group.request.output_token_ids:
                self._count_resumed(first)
        for group in output.preempted:
            kind = "swap" if group.status is SequenceStatus.SWAPPED else "recompute"
            self._sink.increment(PREEMPTIONS, kind=kind)

    def _count_resumed(self, sequence: Sequence) -> None:
        """Count the restored and recomputed tokens of a request that another engine started, without its last one."""
        num_restored = sequence.num_computed_tokens
        for kv, number in (("restored", num_restored), ("recomputed", sequence.num_tokens - 1 - num_restored)):
            if number > 0:
                self._sink.increment(RESUMED_TOKENS, number, kv=kv)

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        now = monotonic()
        intervals: Counter[float] = Counter()  # few values: most sequences sampled their last token in the same step
        for sequence in updated:
            self._token_generated(sequence, now, intervals)
        for seconds, count in intervals.items():
            self._sink.observe(INTER_TOKEN, seconds, count)
        if generated := sum(not sequence.has_failed or sequence in output.num_accepted for sequence in output.sampling):
            self._sink.increment(GENERATION_TOKENS, generated)
        if output.drafts:
            self._report_drafts(output)
        for drafter, seconds in output.drafting_seconds.items():
            self._sink.increment(DRAFTING_SECONDS, seconds, drafter=drafter)
        self._sink.observe(STEP_TOKENS, output.num_tokens)
        self._sink.observe(STEP_SECONDS, times.schedule, phase="schedule")
        if times.draft:
            self._sink.observe(STEP_SECONDS, times.draft, phase="draft")
        self._sink.observe(STEP_SECONDS, times.forward, phase="forward")
        self._sink.observe(STEP_SECONDS, times.sample, phase="sample")
        self.state_changed()

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        times = self._times.pop(group.request_id)
        if rejection is not None:
            self.request_rejected(rejection)
            return
        first = group.sequences[0]
        reason = first.finish_reason
        assert reason is not None
        has_failed = reason is FinishReason.ABORT and first.has_failed
        self._sink.increment(REQUESTS_FINISHED, reason="error" if has_failed else reason.value)
        self._sink.observe(REQUEST_PROMPT, first.num_prompt_tokens)
        self._sink.observe(REQUEST_GENERATION, sum(sequence.num_output_tokens for sequence in group.sequences))
        if times.first_token:  # a resumed request may leave before this engine has generated a token for it
            self._sink.observe(E2E_LATENCY, times.last_token - times.arrived)
            self._sink.observe(DECODE_TIME, times.last_token - times.first_token)
            group.timing = times.timing

    def state_changed(self) -> None:
        """Report the gauges (sequences and blocks by state), and the evictions since the last report."""
        counts = self._block_manager.pool.counts()
        total = len(self._block_manager.pool.blocks)
        self._sink.set(REQUESTS_RUNNING, len(self._scheduler.running))
        self._sink.set(REQUESTS_WAITING, len(self._scheduler.waiting) - self._scheduler.queues.num_swapped)
        self._sink.set(REQUESTS_SWAPPED, self._scheduler.queues.num_swapped)
        self._sink.set(KV_USAGE, counts.used / total)
        self._sink.set(KV_CACHED, counts.cached / total)
        for state in ("free", "cached", "used", "shared"):
            self._sink.set(KV_BLOCKS, getattr(counts, state), state=state)
        if self._block_manager.host_pool.num_pages:
            self._sink.set(TIER_BLOCKS, len(self._block_manager.host_pool.by_name), tier="host")
        self._report_attachments()
        if loaded := self._block_manager.prefix_cache.num_loaded - self._num_loaded:
            self._sink.increment(TIER_HITS, loaded * self._block_manager.block_size, tier="host")
            self._num_loaded += loaded
        if evicted := self._block_manager.prefix_cache.num_evicted - self._num_evicted:
            self._sink.increment(BLOCKS_EVICTED, evicted)
            self._num_evicted += evicted

    def _report_attachments(self) -> None:
        """Report the pages of windows and the states of recurrent layers, if the model has any."""
        for window in self._block_manager.windows:
            counts = window.pages.counts()
            for state in ("free", "cached", "used"):
                self._sink.set(WINDOW_PAGES, getattr(counts, state), window=str(window.window), state=state)
        if (states := self._block_manager.states) is not None:
            counts = states.slots.counts()
            for state, count in (("free", counts.free), ("snapshot", counts.cached), ("used", counts.used)):
                self._sink.set(STATE_SLOTS, count, state=state)

    def _token_generated(self, sequence: Sequence, now: float, intervals: Counter[float]) -> None:
        times = self._times[sequence.request_id]
        if not times.first_token:
            times.first_token = now
            self._sink.observe(TTFT, now - times.arrived)
            self._sink.observe(PREFILL_TIME, now - times.started)
            sequence.group.timing = times.timing
        elif times.last_token < now:  # otherwise another answer of the request has counted this step's interval
            intervals[now - times.last_token] += 1
        times.last_token = now

    def _report_drafts(self, output: SchedulerOutput) -> None:
        drafts, drafted, accepted = Counter(output.proposers.values()), Counter[str](), Counter[str]()
        for sequence, draft in output.drafts.items():
            drafted[output.proposers[sequence]] += len(draft)
            accepted[output.proposers[sequence]] += output.num_accepted.get(sequence, 0)
        for drafter, count in drafted.items():
            self._sink.increment(DRAFTS, drafts[drafter], drafter=drafter)
            self._sink.increment(DRAFT_TOKENS, count, drafter=drafter)
            if accepted[drafter]:
                self._sink.increment(ACCEPTED_TOKENS, accepted[drafter], drafter=drafter)
        for drafter, emitted in Counter(output.proposers[sequence] for sequence in output.num_accepted).items():
            self._sink.increment(EMITTED_TOKENS, emitted + accepted[drafter], drafter=drafter)
        self._report_positions(output)
        if saved := max(output.num_accepted.values(), default=0):
            self._sink.increment(SAVED_STEPS, saved)
        if generated := accepted.total():
            self._sink.increment(GENERATION_TOKENS, generated)

    def _report_positions(self, output: SchedulerOutput) -> None:
        drafted, accepted = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for sequence, draft in output.drafts.items():
            positions = [(output.proposers[sequence], _POSITIONS[index]) for index in range(len(draft))]
            drafted.update(positions)
            accepted.update(positions[: output.num_accepted.get(sequence, 0)])
        for metric, counts in ((DRAFTED_AT, drafted), (ACCEPTED_AT, accepted)):
            for (drafter, position), count in counts.items():
                self._sink.increment(metric, count, drafter=drafter, position=position)
