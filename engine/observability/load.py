"""EngineLoad: how busy an engine is, as routers and the autoscaler want to know it, and the meters behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from engine.scheduling.prefill_backlog import PrefillBacklog
from engine.scheduling.step import SchedulerOutput

__all__ = ["EngineLoad", "LoadMeter", "LoadReporter"]

# Prefill tokens after which a measurement counts half: 16 full steps of 2048 tokens.
HALF_LIFE_TOKENS = 32_768
# Prefill tokens of a step that is measured. A step takes a time of its own, so that a few tokens look slow.
LEAST_MEASURED_TOKENS = 128
# Weight of the latest step in the mean of decode steps.
DECODE_WEIGHT = 0.05
# How many times the mean one decode step can count, so that a pause (of the garbage collector, say) is soon forgotten.
SLOWEST_COUNTED = 4.0
# Seconds after which what only decoding moves is told too: who waits behind long answers must not seem to wait in vain.
QUIET_S = 0.25


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Plain numbers, taken between two steps. It pickles."""

    num_running: int  # sequences in the batch
    num_waiting: int  # requests in the queue, preempted ones included
    queued_prefill_tokens: int  # prompt tokens still to be computed, of waiting and running requests, cached ones not
    num_blocks: int  # of the KV pool
    num_free_blocks: int  # those that hold a cached prefix included
    prefill_tokens_per_s: float  # measured; 0 until a prefill was seen
    decode_step_s: float  # measured time of a step that only decodes; 0 until one was seen
    num_steps: int  # since the engine began: what moves is alive


class LoadMeter:
    """Measures how fast an engine computes.

    ``prefill_tokens_per_s`` comes from steps with many prefill tokens, at least half of all: the ratio of two decayed
    sums, tokens over seconds. Each step is weighted by its tokens, since a queue is worked off in full steps, and a
    hundred short prompts on an idle engine say little about those. ``decode_step_s`` is an exponentially weighted mean
    over steps in which every sequence computes one token. Mixed steps with little prefill belong to neither.

    Args:
        backlog: told of each step.
        clock: seconds that only rise.
    """

    def __init__(self, backlog: PrefillBacklog, clock: Callable[[], float] = perf_counter) -> None:
        self.decode_step_s = 0.0
        self.num_steps = 0
        self._backlog = backlog
        self._clock = clock
        self._started = 0.0
        self._weighted_tokens = 0.0
        self._weighted_seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of steps that mostly prefill; 0 until one was seen."""
        return self._weighted_tokens / self._weighted_seconds if self._weighted_seconds else 0.0

    def step_started(self) -> None:
        """A step begins."""
        self._started = self._clock()

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """A batch was chosen, perhaps an empty one: requests have entered it or had to leave it."""
        for group in output.preempted:
            self._backlog.add(group)
        for group in output.admitted:
            self._backlog.begin(group)

    def step_finished(self, num_tokens: int, num_sequences: int) -> None:
        """A batch was computed."""
        self._backlog.advance()
        self.num_steps += 1
        seconds = self._clock() - self._started
        num_prefill = num_tokens - num_sequences  # each sequence's last token is like a decode's
        if seconds <= 0 or not num_sequences:
            return
        if not num_prefill:
            self._note_decode(seconds)
        elif num_prefill >= LEAST_MEASURED_TOKENS and 2 * num_prefill >= num_tokens:
            self._note_prefill(num_tokens, seconds)

    def _note_prefill(self, num_tokens: int, seconds: float) -> None:
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self._weighted_tokens = decay * self._weighted_tokens + num_tokens * num_tokens
        self._weighted_seconds = decay * self._weighted_seconds + num_tokens * seconds

    def _note_decode(self, seconds: float) -> None:
        mean = self.decode_step_s
        counted = min(seconds, SLOWEST_COUNTED * mean) if mean else seconds
        self.decode_step_s += DECODE_WEIGHT * (counted - mean) if mean else counted


class LoadReporter:
    """Tells a listener when the queue or the batch has changed, but not more often than is of use.

    While neither changes it still tells every ``QUIET_S`` that steps go on and which blocks they take.

    Args:
        listener: called from the step thread; what it raises is the caller's to handle.
        interval_s: between two reports, at least, while the engine is busy.
        clock: seconds that only rise.
    """

    def __init__(self, listener: Callable[[EngineLoad], None], interval_s: float, clock: Callable[[], float]) -> None:
        self._listener = listener
        self._interval = interval_s
        self._clock = clock
        self._told_at = float("-inf")
        self._told: EngineLoad | None = None
        self._num_changes = 0

    def note(self, load: EngineLoad, num_changes: int, *, is_idle: bool) -> float | None:
        """Tell the listener if it is time to.

        Args:
            load: the latest.
            num_changes: requests that have arrived or left so far.
            is_idle: nothing more will happen by itself, so that whatever is new is worth telling.

        Returns:
            Seconds after which to come again with what is kept back; None if nothing is.
        """
        now = self._clock()
        is_all_news = is_idle or now - self._told_at >= QUIET_S
        if num_changes == self._num_changes and not self._has_news(load, is_all_news=is_all_news):
            return None
        if (remaining := self._told_at + self._interval - now) > 0:
            return remaining
        self._told_at, self._told, self._num_changes = now, load, num_changes
        self._listener(load)
        return None

    def _has_news(self, load: EngineLoad, *, is_all_news: bool) -> bool:
        """Whether the queue has changed since the last report, or anything if that is news too."""
        told = self._told
        if told is None or is_all_news:
            return load != told
        return (load.num_waiting, load.num_running, load.queued_prefill_tokens) != (
            told.num_waiting,
            told.num_running,
            told.queued_prefill_tokens,
        )
