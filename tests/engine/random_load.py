"""Random requests on an engine with a shadow runner, with every step and every answer checked.

The hypothesis state machine and the seeded driver ``drive`` share ``RandomLoad``. It adds, aborts and ends requests,
makes steps, and raises an AssertionError as soon as something is wrong: what the shadow runner, ``check_integrity``,
``StepChecks``, ``PlanChecks`` or ``AnswerChecks`` find.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

from engine.errors import RequestError
from engine.outputs import EngineOutput
from engine.request import MAX_RETENTION, EngineRequest
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput, StepTimes
from engine.sequence import Sequence
from engine.worker.runner import ComputedStep
from tests.engine.answer_checks import NO_CHOICE, AnswerChecks, Expected
from tests.engine.plan_checks import PlanChecks
from tests.engine.random_requests import Arrival, random_arrival, random_options
from tests.engine.shadow import check_integrity, make_engine
from tests.engine.shadow_model import ShadowProposer
from tests.engine.step_checks import StepChecks

__all__ = ["RandomLoad", "drive", "drive_seeds"]

UNDECIDED = -2  # on the device, instead of a token


class RandomLoad:
    """An engine under load.

    Args:
        num_draft_tokens: draft tokens of a greedy request in a step, at most; 0 drafts none.
        twins_share: check that equal prompts of one step share what they can (colliding hashes prevent it).
        options: options of ``make_engine``.
    """

    def __init__(self, *, num_draft_tokens: int = 0, twins_share: bool = True, **options: object) -> None:
        if num_draft_tokens:
            options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": num_draft_tokens}
        self.engine, self.runner = make_engine(**options)  # type: ignore[arg-type]
        if (drafter := self.engine.scheduler.drafter) is not None:
            drafter.proposers = {"test": ShadowProposer(self.runner.ids)}  # n-grams would hardly ever be right
        self.requests: dict[str, Expected] = {}
        self.counts: Counter[str] = Counter()  # what has happened, and how often
        self._steps = StepChecks(self.engine, self.runner, self.counts, twins_share=twins_share)
        self._plans = PlanChecks(self.engine, self.runner)
        self._answers = AnswerChecks(self.runner, self.counts, may_drop=not twins_share)
        self._texts: deque[list[int]] = deque([[0]], maxlen=30)
        self._fail_next: int | None = None
        self._rng = random.Random(0)
        self._wasted: set[Sequence] = set()  # that have ended, and of which a token was dropped
        self._resampled: set[Sequence] = set()
        self.engine.runner = self

    def add(self, arrival: Arrival) -> None:
        """Send a request; the engine must reject one that can never run."""
        head = [] if arrival.extends is None else self._texts[arrival.extends % len(self._texts)]
        prompt = (head + arrival.tokens)[: self.engine.validator.capacity + 2]
        request_id = str(self.counts["requests"])
        self.counts["requests"] += 1
        try:
            group = self.engine.add_request(
                EngineRequest(
                    request_id,
                    prompt,
                    arrival.params,
                    priority=arrival.priority,
                    cache_salt=arrival.salt,
                    client=str(len(self.requests) % 3),
                    retention=len(prompt) % (MAX_RETENTION + 1),
                )
            )
        except RequestError:
            self.counts["rejected"] += 1
            assert len(prompt) >= self.engine.validator.capacity or arrival.params.num_sequences > 1, (
                "a small one is rejected"
            )
            return
        self.requests[request_id] = Expected(prompt, arrival.salt, group, self._answers.undisturbed(prompt, group))
        self._texts.append(prompt)

    def abort(self, pick: int) -> None:
        """Abort one of the unfinished requests."""
        request_id = self._pick(pick)
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id), "it was aborted twice"
        del self.requests[request_id]
        self.counts["aborted"] += 1
        check_integrity(self.engine)

    def end_answer(self, pick: int) -> None:
        """End one answer from outside, as a stop string does."""
        request_id = self._pick(pick)
        expected = self.requests[request_id]
        unfinished = expected.group.unfinished
        index = unfinished[pick % len(unfinished)].index
        if expected.group.outputs_at_end or not expected.group.is_forked:
            assert not self.engine.end_sequence(request_id, index), "an answer is ended that has no output yet"
            return
        assert self.engine.end_sequence(request_id, index)
        assert not self.engine.end_sequence(request_id, index), "it was ended twice"
        if len(unfinished) == 1:
            del self.requests[request_id]
        self.counts["answers ended from outside"] += 1
        check_integrity(self.engine)

    def fail_next(self, pick: int) -> None:
        """Let one sequence of the next step have no token to sample."""
        self._fail_next = pick

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()
        check_integrity(self.engine)

    def step(self) -> None:
        """Make one step, and check it and its outputs."""
        was_in_flight = self.engine._in_flight is not None
        steps_before, started_before = self.runner.num_steps, self._num_started()
        self._steps.start_step(self._unfinished())
        outputs = self._watched_step()
        if self.runner.num_steps == steps_before:
            # Beams that are cached whole start one by one; a reset cache may make a group too wide for its pool once.
            self.counts["steps without a batch"] += 1
            assert was_in_flight or self._num_started() != started_before, "a step computes nothing"
        for output in outputs:
            self.counts["tokens from drafts"] += max(0, len(output.token_ids) - 1) * self._streams(output)
            self._receive(output)
        check_integrity(self.engine)
        self._steps.check_published()
        self.counts["steps"] += 1

    def _watched_step(self) -> list[EngineOutput]:
        """Make a step; assert that each sequence that has ended wastes one token, and others only resampled ones."""
        launched = self.engine._in_flight
        sampling = [] if launched is None else launched.output.sampling
        outputs = self.engine.step()
        if launched is not None:
            wasted = set(sampling) - set(launched.output.sampling)
            assert len(wasted) == launched.output.num_wasted
            assert not wasted & self._wasted, "two tokens of a sequence that has ended are wasted"
            self._wasted |= {sequence for sequence in wasted if sequence.is_finished}
            assert wasted - self._wasted <= self._resampled, "the token of a sequence that goes on is wasted"
            self.counts["wasted"] += len(wasted)
        return outputs

    def finish(self) -> None:
        """Step until nothing is left, which must happen within a bounded number of steps; nothing may be kept."""
        # The first request computes a token each step, and restarts only if a more important one arrives.
        groups = [expected.group for expected in self.requests.values()]
        longest = sum(group.max_total_tokens * group.params.num_sequences for group in groups)
        for _ in range((2 + self.engine._overlaps_steps) * longest * len(groups)):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, "the engine makes no progress"
        assert not self.requests, "a request has ended without a last output"
        check_integrity(self.engine)  # also where the last request was aborted, or none was accepted
        assert not self.engine._groups, "the engine keeps a request that has ended"
        self.counts["evicted"] = self.engine.block_manager.prefix_cache.num_evicted
        self.counts["swapped blocks"] = self.runner.num_copied["block in"]
        self.counts["pages from the host"] = self.runner.num_copied["page in"]
        self.counts["states from the host"] = self.runner.num_copied["state in"]
        self.counts["copied states"] = self.runner.num_copied["state copied"]
        self.counts["saved states"] = self.runner.num_copied["saved state"]
        if (states := self.engine.block_manager.states) is not None:
            self.counts["evicted snapshots"] = states.snapshots.num_evicted

    def _pick(self, pick: int) -> str:
        return list(self.requests)[pick % len(self.requests)]

    def _unfinished(self) -> list[Sequence]:
        return [sequence for expected in self.requests.values() for sequence in expected.group.unfinished]

    def _num_started(self) -> int:
        return sum(bool(sequence.block_table) for sequence in self._unfinished())

    def _streams(self, output: EngineOutput) -> bool:
        return not self.requests[output.request_id].group.outputs_at_end

    def _receive(self, output: EngineOutput) -> None:
        expected = self.requests[output.request_id]
        self._answers.receive(expected, output)
        if output.is_last:
            self._texts.append(expected.prompt + expected.group.sequences[0].output_token_ids)
            del self.requests[output.request_id]
            self.counts["finished"] += 1

    # --- between the engine and the shadow runner ---------------------------------------------------------------

    def start(self, output: SchedulerOutput) -> ComputedStep:
        """Do what ``run`` does, and withhold the tokens."""
        return ComputedStep(self.run(output, StepTimes()))

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Check what was scheduled, let the shadow runner compute it, and fail a sequence if one is to fail."""
        self._steps.check(output)
        self._plans.check(output)
        self._count_overlap(output)
        sampled = self.runner.run(output, times)
        self._resample_on_host(output, sampled)
        if self._fail_next is not None and output.sampling:
            position = self._fail_next % len(output.sampling)
            sampled.failed[position] = NO_CHOICE
            self._fail_next = None
            self.counts["failed"] += 1
        return sampled

    def _count_overlap(self, output: SchedulerOutput) -> None:
        self.counts["steps on pending tokens"] += any(sequence.num_pending for sequence in output.sequences)
        self.counts["waits for a token"] += any(sequence.awaits_token for sequence in self.engine.scheduler.running)
        self.counts["waits for blocks"] += output.lacks_blocks

    def _resample_on_host(self, output: SchedulerOutput, sampled: SampledTokens) -> None:
        """Give the device no token of a few sequences for which the host will have one, as where top-p is undecided."""
        for position, sequence in enumerate(output.sampling):
            if self.engine._overlaps_steps and not sequence.params.is_greedy and self._rng.random() < 0.02:
                self.runner.on_device[sequence], self.runner.sampled_ids[position] = 0, UNDECIDED
                self.runner.undecided.add(sequence)
                sampled.resampled_on_host.append(position)
                self._resampled.add(sequence)
                self.counts["resampled on the host"] += 1

    def close(self) -> None:
        """Nothing was started."""


def drive(
    seed: int, num_steps: int = 120, draw: Callable[[random.Random], Arrival] = random_arrival, **options: object
) -> RandomLoad:
    """Put a random load on an engine until all requests have ended; ``options`` override the drawn ones."""
    rng = random.Random(seed)
    load = RandomLoad(**(random_options(rng) | options))
    for _ in range(num_steps):
        if len(load.requests) < 10 and rng.random() < 0.4:
            arrival = draw(rng)
            for _ in range(rng.choice([1, 1, 1, 2, 3])):  # some come with twins
                load.add(arrival)
        if load.requests:
            act(load, rng)
        if load.requests:
            load.step()
    load.finish()
    return load


def act(load: RandomLoad, rng: random.Random) -> None:
    """Disturb the engine now and then."""
    event, pick = rng.random(), rng.randrange(10**6)
    if event < 0.01:
        load.abort(pick)
    elif event < 0.02:
        load.end_answer(pick)
    elif event < 0.023:
        load.fail_next(pick)
    elif event < 0.025:
        load.reset_prefix_cache()


def drive_seeds(
    first_seed: int,
    num_steps: int,
    least: dict[str, int],
    draw_options: Callable[[int], dict[str, object]] = lambda seed: {},
    **options: object,
) -> None:
    """Drive one seed after another for so many steps; a failure names the seed, and ``drive(seed)`` repeats it.

    Args:
        first_seed: the first seed.
        num_steps: in all, at least.
        least: what has to have happened in 100,000 steps, and how often.
        draw_options: returns the options for a seed.
        options: of all seeds.
    """
    counts: Counter[str] = Counter()
    seed = first_seed
    while counts["steps"] < num_steps:
        try:
            counts += drive(seed, **draw_options(seed), **options).counts
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1
    wanted = {name: count * num_steps // 100_000 for name, count in least.items()}
    missed = {name: counts[name] for name, count in wanted.items() if counts[name] < count}
    assert not missed, f"too seldom in {counts['steps']} steps: {missed}"
