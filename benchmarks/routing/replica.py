"""A simulated replica: a block cache, prefills one after the other, decodes beside them at a constant pace.

    dispatch -> arrives -> (queue) -> prefill starts: blocks matched, room made -> every chunk: its blocks published
    -> prefill ends: first token -> decodes -> ends: blocks released

Like the engine it counts a queued block once, however many requests wait for it.

It reports its load on every change, but not more often than ``MIN_REPORT_S``, and else every ``HEARTBEAT_S``, and logs
what it stores and evicts. Readers and delays are not known here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from benchmarks.routing.tiers import PullRates, TieredCache
from benchmarks.routing.traces import BLOCK_SIZE, Request
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepCosts

__all__ = ["CPU_STEPS", "SHARED_STEPS", "Finished", "Job", "KVLogEntry", "Settings", "SimulatedReplica", "Work"]

MIN_REPORT_S = 0.01
HEARTBEAT_S = 0.1
KEPT_S = 1.0  # reports are kept for readers that missed later ones


# A second engine: 20 ms of a step with answers, and 10 ms for each 72,000 tokens in their contexts.
SHARED_STEPS = StepCosts(base_s=0.020, prefill_token_s=1 / 6_500, sequence_s=0.0, kv_token_s=0.010 / 72_000)
# A third: Pagoda's engine with a model of Qwen3-0.6B's shape on two cores, as benchmarks.step_costs has measured it.
CPU_STEPS = StepCosts(base_s=0.0291, prefill_token_s=0.001221, sequence_s=0.00214, kv_token_s=0.00000057)


@dataclass(frozen=True, slots=True)
class Settings:
    """The cluster that is simulated."""

    num_replicas: int = 8
    cache_tokens: int = 1_500_000  # of each replica
    prefill_rate: float = 6_500.0  # tokens/s
    decode_step_s: float = 0.03
    steps: StepCosts | None = None  # prompts and answers share steps; None: decodes cost prefills nothing
    chunk_tokens: int = 2_048  # of prompts, computed in one step
    dispatch_s: float = 0.005  # from the decision to the replica's queue
    network_s: float = 0.002  # from the replica to the ingresses, of events and reports
    loss: float = 0.0  # probability per event batch and report, for each ingress
    num_ingresses: int = 1
    num_subsets: int = 1  # groups of replicas, of which the second block of a prompt chooses one
    announce: bool = True  # replicas announce the blocks of each request that joins the queue
    host_tokens: int = 0  # of the host tier of each replica
    load_bytes_per_s: float = inf  # from the host tier to the device, during which the engine computes nothing
    pull_bytes_per_s: float = 0.0  # of the link of each replica, in each direction; 0: replicas pull nothing
    token_bytes: int = 131_072  # KV of a token

    @property
    def cache_blocks(self) -> int:
        """Blocks of one replica's cache."""
        return self.cache_tokens // BLOCK_SIZE

    @property
    def load_s(self) -> float:
        """Seconds to load a block from the host tier."""
        return BLOCK_SIZE * self.token_bytes / self.load_bytes_per_s


@dataclass(slots=True, eq=False)
class Job:
    """A request in the cluster."""

    number: int
    request: Request
    ingress: int
    replica: str = ""
    predicted_blocks: int = 0
    source: str = ""  # the replica from which blocks are pulled
    source_blocks: int = 0  # of the prompt, which the source is expected to hold
    tokens: int = 0  # to compute: an estimate until the prefill starts
    load_s: float = 0.0  # to load blocks from the host tier
    hit_tokens: int = 0
    first_token_at: float = -1.0
    ended_at: float = -1.0
    retries: int = 0


@dataclass(slots=True)
class KVLogEntry:
    """The changes of one step."""

    at: float
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    cleared: bool = False


class Work(NamedTuple):
    """What a replica has begun."""

    ends_at: float
    started: tuple[Job, ...]  # requests that have left the queue


class Finished(NamedTuple):
    """What the end of a piece of work brought."""

    first_tokens: tuple[Job, ...]  # requests with a first token
    ended: tuple[Job, ...]  # requests with their last token
    decode_s: float | None  # until the last tokens of `first_tokens`; None: later work brings them


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One engine. Its methods are called in order of time."""

    name: str
    settings: Settings
    cache: TieredCache = field(init=False)
    queue: deque[Job] = field(default_factory=deque)
    waiting: dict[Job, None] = field(default_factory=dict)  # for blocks on their way, before they are queued
    pulls: PullRates = field(default_factory=PullRates)
    current: Job | None = None
    decoding: int = 0
    log: list[KVLogEntry] = field(default_factory=list)
    reports: deque[tuple[float, EngineLoad]] = field(default_factory=deque)
    computed_tokens: int = 0
    is_read: bool = False  # a policy reads the reports
    _awaited: Counter[int] = field(default_factory=Counter)  # blocks of the requests in the queue
    _queued_tokens: int = 0
    _prefill_ends: float = 0.0
    _reported_at: float = -1.0
    _next_report_at: float = 0.0

    def __post_init__(self) -> None:
        self.cache = self._empty_cache()

    def _empty_cache(self) -> TieredCache:
        return TieredCache(self.settings.cache_blocks, self.settings.host_tokens // BLOCK_SIZE)

    # --- requests --------------------------------------------------------------------------------------------------

    def arrive(self, job: Job, now: float) -> None:
        """Queue a request."""
        self._expect(job, self.match_with_queue(job.request.hashes), now)
        self.queue.append(job)
        self._changed(now)

    def wait(self, job: Job, now: float) -> None:
        """Let a request wait for blocks on their way; ``end_wait`` ends it."""
        self._expect(job, max(self.match_with_queue(job.request.hashes), job.source_blocks), now)
        self.waiting[job] = None
        self._changed(now)

    def end_wait(self, job: Job) -> None:
        """Forget a request that waits."""
        del self.waiting[job]
        self._queued_tokens -= job.tokens
        self._awaited.subtract(job.request.hashes)

    def _expect(self, job: Job, known: int, now: float) -> None:
        self.report_until(now)
        job.tokens = max(1, job.request.input_tokens - known * BLOCK_SIZE)
        self._queued_tokens += job.tokens
        self._awaited.update(job.request.hashes)
        if self.settings.announce and known < len(job.request.hashes):
            self.log_now(KVLogEntry(now, awaited=job.request.hashes[known:]))

    def begin(self, now: float) -> Work | None:
        """Begin the next prefill, if there is one and none runs."""
        if self.current is not None or not self.queue:
            return None
        self.report_until(now)
        job = self.current = self._take(now)
        loaded = now + job.load_s
        self._prefill_ends = loaded + job.tokens / self.settings.prefill_rate
        self._log_chunks(job.request.hashes[job.hit_tokens // BLOCK_SIZE :], loaded)
        self._changed(now)
        return Work(self._prefill_ends, (job,))

    def _take(self, now: float) -> Job:
        """Take the first request of the queue, with blocks for its prompt."""
        job = self.queue.popleft()
        self._queued_tokens -= job.tokens
        self._awaited.subtract(job.request.hashes)
        matched = self.cache.match(job.request.hashes)
        job.tokens = max(1, job.request.input_tokens - matched * BLOCK_SIZE)
        job.hit_tokens = job.request.input_tokens - job.tokens
        job.load_s = self.settings.load_s * self.cache.num_on_host(job.request.hashes[:matched])
        evicted = self.cache.use(job.request.hashes)
        if evicted:
            self.log.append(KVLogEntry(now, removed=tuple(evicted)))
        return job

    def finish(self, now: float) -> Finished:
        """End the current prefill; its request decodes from now on."""
        self.report_until(now)
        job, self.current = self.current, None
        assert job is not None
        job.first_token_at = now
        self.computed_tokens += job.tokens
        self.decoding += 1
        self._changed(now)
        return Finished((job,), (), (job.request.output_tokens - 1) * self.settings.decode_step_s)

    def _log_chunks(self, hashes: Sequence[int], now: float) -> None:
        """Log in advance the blocks that each step of a starting prefill will publish at its end."""
        chunk = max(1, self.settings.chunk_tokens // BLOCK_SIZE)
        for start in range(0, len(hashes), chunk):
            stored = tuple(hashes[start : start + chunk])
            at = now + (start + len(stored)) * BLOCK_SIZE / self.settings.prefill_rate
            self.log.append(KVLogEntry(at, stored=stored))

    def log_now(self, entry: KVLogEntry) -> None:
        """Log an entry before those that a prefill has logged in advance."""
        self.log.insert(bisect_right(self.log, entry.at, key=lambda logged: logged.at), entry)

    def match_with_queue(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks will be cached after the prefill of all queued requests."""
        for depth, block in enumerate(hashes):
            if block not in self.cache and not self._awaited[block]:
                return depth
        return len(hashes)

    def end(self, job: Job, now: float) -> None:
        """Release the blocks of a request."""
        self.report_until(now)
        self.decoding -= 1
        self.cache.release(job.request.hashes)
        self._changed(now)

    def restart(self, now: float) -> list[Job]:
        """Lose all state; return the requests without a first token."""
        self.report_until(now)
        lost = self._without_first_token()
        self.cache, self.current, self.decoding, self._queued_tokens = self._empty_cache(), None, 0, 0
        self.queue.clear()
        self.waiting.clear()
        self._awaited.clear()
        while self.log and self.log[-1].at > now:
            self.log.pop()  # chunks that will not be computed
        self.log.append(KVLogEntry(now, cleared=True))
        self._changed(now)
        return lost

    def _without_first_token(self) -> list[Job]:
        return [*([self.current] if self.current is not None else []), *self.queue, *self.waiting]

    # --- reports ---------------------------------------------------------------------------------------------------

    def queued_tokens(self, now: float) -> int:
        """Return the prompt tokens still to be computed."""
        remaining = (self._prefill_ends - now) * self.settings.prefill_rate if self.current is not None else 0.0
        return self._queued_tokens + round(max(0.0, remaining))

    def load(self, now: float) -> EngineLoad:
        """Return the load that the engine reports now."""
        running = self.decoding + (self.current is not None)
        blocks, used = self.settings.cache_blocks, self.cache.num_used
        steps = int(now / self.settings.decode_step_s)
        pending = self._without_first_token()
        return EngineLoad(
            running,
            len(self.queue) + len(self.waiting),
            self.queued_tokens(now),
            blocks,
            max(0, blocks - used),
            self.settings.prefill_rate,
            steps,
            self.decoding,
            0,
            len(pending),
            sum(job.request.input_tokens for job in pending),
            StepCosts(self.settings.decode_step_s, 1 / self.settings.prefill_rate),
            self.pulls.reported(),
        )

    def report_until(self, now: float) -> None:
        """Publish the periodic reports up to now, during which the load is constant."""
        if not self.is_read:
            return
        late = now - self.settings.network_s - KEPT_S
        if self._next_report_at < late:  # older reports are never read
            self._next_report_at += int((late - self._next_report_at) / HEARTBEAT_S) * HEARTBEAT_S
        while self._next_report_at <= now:
            self.reports.append((self._next_report_at, self.load(self._next_report_at)))
            self._reported_at = self._next_report_at
            self._next_report_at += HEARTBEAT_S
        while len(self.reports) > 1 and self.reports[1][0] < late:
            self.reports.popleft()

    def _changed(self, now: float) -> None:
        self._next_report_at = min(self._next_report_at, max(now, self._reported_at + MIN_REPORT_S))
