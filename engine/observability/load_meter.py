"""LoadMeter: measures how fast an engine computes, and how much it has to compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

from engine.errors import OverloadedError
from engine.kv.block_manager import BlockManager
from engine.observability.load import EngineLoad, EngineStats
from engine.observability.observer import EngineObserver
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup

__all__ = ["LoadMeter"]

# Prefill tokens after which the weight of a measurement has halved: 16 full steps of 2048 tokens.
HALF_LIFE_TOKENS = 32_768
# Minimum prefill tokens of a step that is measured. With fewer, the fixed cost of a step makes prefill look slow.
MIN_PREFILL_TOKENS = 128
# Weight of the latest step in the mean of decode steps.
DECODE_WEIGHT = 0.05
# Longest decode step that is counted, in multiples of the mean, so that a pause (of the garbage collector, say) does
# not distort the mean for long.
MAX_SLOWDOWN = 4.0


class LoadMeter(EngineObserver):
    """Measures how fast an engine computes, counts its steps and requests, and keeps its prefill backlog.

    ``prefill_tokens_per_s`` comes from steps with many prefill tokens, at least half of all: the ratio of two decayed
    sums, tokens over seconds. Each step is weighted by its tokens, because a long queue is computed in full steps, and
    the steps of short prompts on an idle engine are slower per token. ``decode_step_s`` is an exponentially weighted
    mean over steps in which every sequence computes one token. Other steps are not measured.

    Args:
        scheduler: has the queue and the batch.
        block_manager: has the KV pool.
        backlog: the prefill tokens still to be computed; the meter keeps it up to date.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        block_manager: BlockManager,
        backlog: PrefillBacklog,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.decode_step_s = 0.0
        self.num_steps = 0
        self.num_changes = 0  # requests that have arrived, and requests that have left
        self._scheduler = scheduler
        self._block_manager = block_manager
        self._backlog = backlog
        self._clock = clock
        self._started = self._finished = 0.0  # the last call of Engine.step, and the last step that was finished
        # The steps that are not finished, and when each was begun.
        self._launched: deque[tuple[SchedulerOutput, float]] = deque()
        self._weighted_tokens = 0.0
        self._weighted_seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of steps that mostly prefill; 0 before the first one."""
        return self._weighted_tokens / self._weighted_seconds if self._weighted_seconds else 0.0

    def load(self) -> EngineLoad:
        """Return the numbers as they are now, in constant time."""
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            queued_prefill_tokens=self._backlog.num_tokens,
            num_blocks=len(self._block_manager.pool.blocks),
            num_free_blocks=self._block_manager.num_free_blocks,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            num_steps=self.num_steps,
        )

    def stats(self) -> EngineStats:
        """Count sequences and blocks by state."""
        counts, scheduler = self._block_manager.pool.counts(), self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) - scheduler.queues.num_swapped,
            num_swapped=scheduler.queues.num_swapped,
            num_free_blocks=counts.free,
            num_cached_blocks=counts.cached,
            num_used_blocks=counts.used,
        )

    def request_added(self, group: SequenceGroup, arrived: float) -> None:
        self.num_changes += 1
        self._backlog.add_group(group)

    def step_started(self) -> None:
        self._started = self._clock()

    def step_scheduled(self, output: SchedulerOutput) -> None:
        if not output.is_empty:
            self._launched.append((output, self._started))
        for group in output.preempted:
            self._backlog.add_group(group)
        for group in output.admitted:
            self._backlog.start_group(group)

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        self._backlog.advance()
        self.num_steps += 1
        launched = None
        while launched is not output:  # steps before it have failed
            launched, started = self._launched.popleft()
        # A step that was launched while another one was in flight begins when that one is finished.
        now, begun = self._clock(), max(started, self._finished)
        self._finished = now
        self._measure(output.num_tokens - output.num_draft_tokens, len(output.sequences), now - begun)

    def sequence_ended(self, sequence: Sequence) -> None:
        self._backlog.remove_sequence(sequence)

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        self.num_changes += 1
        self._backlog.remove_group(group)

    def _measure(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Add the time of a step to a mean; ``num_tokens`` were computed, draft tokens excluded."""
        num_prefill_tokens = num_tokens - num_sequences  # the last token of each sequence costs as much as a decode
        if seconds <= 0 or not num_sequences:
            return
        if not num_prefill_tokens:
            self._add_decode(seconds)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS and 2 * num_prefill_tokens >= num_tokens:
            self._add_prefill(num_tokens, seconds)

    def _add_prefill(self, num_tokens: int, seconds: float) -> None:
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self._weighted_tokens = decay * self._weighted_tokens + num_tokens * num_tokens
        self._weighted_seconds = decay * self._weighted_seconds + num_tokens * seconds

    def _add_decode(self, seconds: float) -> None:
        mean = self.decode_step_s
        counted = min(seconds, MAX_SLOWDOWN * mean) if mean else seconds
        self.decode_step_s += DECODE_WEIGHT * (counted - mean) if mean else counted
