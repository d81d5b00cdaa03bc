"""SharedStepReplica: a simulated replica whose steps compute prompts and answers together, as Pagoda's engine does.

The time of a step is linear in what it computes (``StepCosts``). A step takes up to ``Settings.chunk_tokens`` tokens of
prompts, first come, first served, and one token of each answer. So a replica with many or long answers prefills later,
and each prefill delays all its answers, which the replica in replica.py does not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.routing.replica import Finished, Job, KVLogEntry, SimulatedReplica, Work
from benchmarks.routing.traces import BLOCK_SIZE
from engine.observability.load import EngineLoad
from engine.observability.step_costs import StepSpeeds

__all__ = ["SharedStepReplica"]


@dataclass(slots=True, eq=False)
class SharedStepReplica(SimulatedReplica):
    """One engine with such steps."""

    num_steps: int = 0
    answers: dict[Job, int] = field(default_factory=dict)  # requests that decode -> tokens still to come
    decode_kv_tokens: int = 0  # in the contexts of the answers
    slowdown: float = 1.0  # of its steps
    speeds: StepSpeeds = field(default_factory=StepSpeeds)
    is_stepping: bool = False
    _plan: list[tuple[Job, int, int]] = field(default_factory=list)  # a request, and which tokens of its prompt
    _computed: int = 0  # tokens of the current request's prompt

    def begin(self, now: float) -> Work | None:
        """Begin a step, if there is anything to compute and none runs."""
        if self.is_stepping:
            return None
        started, budget = [], self.settings.chunk_tokens
        self._plan = []
        while budget and (self.current is not None or self.queue):
            if self.current is None:
                self.report_until(now)
                self.current = self._take(now)
                self._computed = self.current.hit_tokens
                started.append(self.current)
                self._changed(now)
            job, first = self.current, self._computed
            self._computed = min(first + budget, job.request.input_tokens)
            self._plan.append((job, first, self._computed))
            budget -= self._computed - first
            if self._computed == job.request.input_tokens:
                self.current = None
        if not self._plan and not self.answers:
            return None
        self.is_stepping = True
        loading_s = sum(job.load_s for job in started)
        return Work(now + loading_s + self._seconds(self.settings.chunk_tokens - budget), tuple(started))

    def _seconds(self, prefill_tokens: int) -> float:
        assert self.settings.steps is not None
        step = prefill_tokens, len(self.answers), self.decode_kv_tokens
        seconds = self.slowdown * self.settings.steps.seconds(*step)
        self.speeds.record(*step, seconds)
        return seconds

    def finish(self, now: float) -> Finished:
        """End the step."""
        self.report_until(now)
        self.is_stepping = False
        self.num_steps += 1
        for job in self.answers:
            self.answers[job] -= 1
        ended = [job for job, remaining in self.answers.items() if remaining <= 0]
        for job in ended:
            del self.answers[job]
            self.decode_kv_tokens -= job.request.input_tokens
        first_tokens = []
        for job, first, end in self._plan:
            self.computed_tokens += end - first
            if stored := job.request.hashes[first // BLOCK_SIZE : end // BLOCK_SIZE]:
                self.log.append(KVLogEntry(now, stored=stored))
            if end == job.request.input_tokens:
                first_tokens.append(job)
                self._decode(job, now)
                if job not in self.answers:
                    ended.append(job)
        self._plan = []
        self._changed(now)
        return Finished(tuple(first_tokens), tuple(ended), None)

    def _decode(self, job: Job, now: float) -> None:
        job.first_token_at = now
        self.decoding += 1
        if job.request.output_tokens > 1:
            self.answers[job] = job.request.output_tokens - 1
            self.decode_kv_tokens += job.request.input_tokens

    def restart(self, now: float) -> list[Job]:
        """Lose all state; return the requests without a first token."""
        lost = SimulatedReplica.restart(self, now)
        self.answers, self.decode_kv_tokens, self._plan, self.is_stepping = {}, 0, [], False
        return lost

    def _without_first_token(self) -> list[Job]:
        finishing = [job for job, _, _ in self._plan if job is not self.current]
        return [*finishing, *SimulatedReplica._without_first_token(self)]

    def queued_tokens(self, now: float) -> int:
        """Return the prompt tokens still to be computed."""
        rest = self.current.request.input_tokens - self._computed if self.current is not None else 0
        return self._queued_tokens + rest + sum(end - first for _, first, end in self._plan)

    def load(self, now: float) -> EngineLoad:
        """Return the load that the engine reports now."""
        blocks, used = self.settings.cache_blocks, self.cache.num_used
        pending = self._without_first_token()
        return EngineLoad(
            self.decoding + (self.current is not None),
            len(self.queue) + len(self.waiting),
            self.queued_tokens(now),
            blocks,
            max(0, blocks - used),
            self.speeds.prefill_tokens_per_s,
            self.num_steps,
            len(self.answers),
            self.decode_kv_tokens,
            len(pending),
            sum(job.request.input_tokens for job in pending),
            self.speeds.costs,
            self.pulls.reported(),
        )
