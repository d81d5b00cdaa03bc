"""LoadMeter: measures how fast an engine computes, and how much it has to compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from time import perf_counter

from engine.errors import OverloadedError
from engine.kv.block_manager import BlockManager
from engine.observability.load import EngineLoad, EngineStats, SourceRate
from engine.observability.observer import EngineObserver
from engine.observability.step_costs import StepSpeeds
from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup

__all__ = ["LoadMeter"]

_num_computed_tokens = attrgetter("num_computed_tokens")


class LoadMeter(EngineObserver):
    """Measures how fast an engine computes, counts its steps and requests, and keeps its prefill backlog.

    Args:
        scheduler: has the queue and the batch.
        block_manager: has the KV pool.
        backlog: the prefill tokens still to be computed; the meter keeps it up to date.
        clock: monotonic seconds.

    Attributes:
        source_rates: returns how fast KV has come from each source, the latest ``MAX_SOURCE_RATES``. An engine
            with tiers sets it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        block_manager: BlockManager,
        backlog: PrefillBacklog,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.speeds = StepSpeeds()
        self.source_rates: Callable[[], tuple[SourceRate, ...]] = tuple
        self.num_steps = 0
        self.num_changes = 0  # requests that have arrived, and requests that have left
        self._scheduler = scheduler
        self._block_manager = block_manager
        self._backlog = backlog
        self._clock = clock
        self._started = self._finished = 0.0  # the last call of Engine.step, and the last step that was finished
        # The steps that are not finished, and when each was begun.
        self._launched: deque[tuple[SchedulerOutput, float]] = deque()
        self._decoding: set[Sequence] = set()  # those that the last step gave a token, unless they have ended

    def load(self) -> EngineLoad:
        """Return the numbers as they are now, in time proportional to the batch."""
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            queued_prefill_tokens=self._backlog.num_tokens,
            num_blocks=len(self._block_manager.pool.blocks),
            num_free_blocks=self._block_manager.num_free_blocks,
            prefill_tokens_per_s=self.speeds.prefill_tokens_per_s,
            num_steps=self.num_steps,
            num_decoding=len(self._decoding),
            num_decoding_tokens=sum(map(_num_computed_tokens, self._decoding)),
            num_pending=self._backlog.num_sequences,
            num_pending_tokens=self._backlog.num_context_tokens,
            step_costs=self.speeds.costs,
            source_rates=self.source_rates(),
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
            self._decoding.difference_update(group.sequences)
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
        num_tokens = output.num_tokens - output.num_draft_tokens
        decoding = output.sequences if num_tokens == len(output.sequences) else _decoding(output)
        num_kv_tokens = sum(map(_num_computed_tokens, decoding))
        self.speeds.record(num_tokens - len(decoding), len(decoding), num_kv_tokens, now - begun)
        # A request may have been aborted while the step was in flight.
        sampling = (sequence for sequence in output.sampling if not sequence.is_finished)
        self._decoding = set(sampling).difference(output.cancelled)

    def sequence_ended(self, sequence: Sequence) -> None:
        self._backlog.remove_sequence(sequence)
        self._decoding.discard(sequence)

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        self.num_changes += 1
        self._backlog.remove_group(group)
        self._decoding.difference_update(group.sequences)


def _decoding(output: SchedulerOutput) -> list[Sequence]:
    """Return the sequences of a step that compute one token, draft tokens aside."""
    drafts = output.drafts
    return [
        sequence
        for sequence, number in zip(output.sequences, output.num_new_tokens, strict=True)
        if number == 1 or sequence in drafts
    ]
