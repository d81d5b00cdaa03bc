"""Random requests on an engine with a shadow runner behind it, and what is expected of every step and every answer.

``RandomLoad`` is what the hypothesis state machine and the seeded driver have in common: it adds, aborts and ends
requests, makes steps, and raises an AssertionError as soon as something is wrong. Besides what the shadow runner and
``check_integrity`` see, it checks that nobody is starved, that blocks are shared, written and published as they ought
to be, and that each answer is that of an undisturbed engine.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.errors import RequestError
from engine.kv import prefix_cache as prefix_cache_module
from engine.outputs import EngineOutput, FinishReason
from engine.prefix_hash import pack_tokens, root_hash
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.step import SampledTokens, SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.engine.shadow import ShadowProposer, check_integrity, make_engine, next_token, token_logprob

NO_CHOICE = "there is no token to go on with"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that comes in."""

    tokens: list[int]
    params: SamplingParams
    extends: int | None = None  # the how-manieth of the latest texts its prompt begins with
    salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class Expected:
    """An unfinished request: what an undisturbed engine answers, and what has come so far."""

    prompt: list[int]
    salt: str
    group: SequenceGroup
    answers: list[list[int]]
    got: dict[int, list[int]] = field(default_factory=dict)
    held_back: list[EngineOutput] = field(default_factory=list)


class RandomLoad:
    """An engine under load.

    Args:
        num_draft_tokens: guess so many tokens of a greedy request, at most; 0 guesses none.
        twins_share: check that what equal prompts of one step can share is shared (colliding hashes prevent it).
        options: of ``make_engine``.
    """

    def __init__(self, *, num_draft_tokens: int = 0, twins_share: bool = True, **options: object) -> None:
        if num_draft_tokens:
            options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": num_draft_tokens}
        self.engine, self.runner = make_engine(**options)  # type: ignore[arg-type]
        if (drafter := self.engine.scheduler.drafter) is not None:
            drafter.proposer = ShadowProposer(self.runner.ids)  # n-grams would hardly ever be right
        self.engine.runner = self
        self.requests: dict[str, Expected] = {}
        self.counts: Counter[str] = Counter()  # what has happened, and how often
        self._texts: deque[list[int]] = deque([[0]], maxlen=30)
        self._twins_share = twins_share
        self._fail_next: int | None = None
        self._settled: set[Sequence] = set()  # those that have K and V from an earlier step
        self._hashes: dict[object, int] = {}  # of prefixes that fill blocks, by identity
        self._free = self.engine.block_manager.free
        self.engine.block_manager.free = self._watch_free  # type: ignore[method-assign]

    # --- what happens to it -------------------------------------------------------------------------------------

    def add(self, arrival: Arrival) -> None:
        """Send a request; one that can never run has to be refused at the door."""
        head = [] if arrival.extends is None else self._texts[arrival.extends % len(self._texts)]
        prompt = (head + arrival.tokens)[: self.engine.validator.capacity + 2]
        request_id = str(self.counts["requests"])
        self.counts["requests"] += 1
        try:
            group = self.engine.add_request(
                EngineRequest(request_id, prompt, arrival.params, priority=arrival.priority, cache_salt=arrival.salt)
            )
        except RequestError:
            self.counts["refused"] += 1
            assert len(prompt) >= self.engine.validator.capacity or arrival.params.num_sequences > 1, (
                "a small one is refused"
            )
            return
        self.requests[request_id] = Expected(prompt, arrival.salt, group, self._undisturbed(prompt, group))
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
            assert not self.engine.end_sequence(request_id, index), "nothing was told that could be ended"
            return
        assert self.engine.end_sequence(request_id, index)
        assert not self.engine.end_sequence(request_id, index), "it was ended twice"
        if len(unfinished) == 1:
            del self.requests[request_id]
        self.counts["answers ended from outside"] += 1
        check_integrity(self.engine)

    def fail_next(self, pick: int) -> None:
        """Let one row of the next step have nothing to sample from."""
        self._fail_next = pick

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()
        check_integrity(self.engine)

    def step(self) -> None:
        """Make one step and check it and what it tells."""
        steps_before, begun_before = self.runner.num_steps, self._num_begun()
        self._settled = {one for one in self._unfinished() if one.block_table or one.host_table}
        outputs = self.engine.step()
        if self.runner.num_steps == steps_before:
            # Beams that are cached whole begin one by one; a reset cache may make a group too wide for its pool once.
            self.counts["steps without a batch"] += 1
            assert self._num_begun() != begun_before, "a step computes nothing"
        for output in outputs:
            self.counts["tokens from drafts"] += max(0, len(output.token_ids) - 1) * self._is_told_at_once(output)
            self._hear(output)
        check_integrity(self.engine)
        self._check_published()
        self.counts["steps"] += 1

    def finish(self) -> None:
        """Step until nothing is left, which must happen within a bounded number of steps."""
        # The first in rank gets on by a token each step, and starts again only if one of higher rank came in.
        groups = [expected.group for expected in self.requests.values()]
        longest = sum(group.max_total_tokens * group.params.num_sequences for group in groups)
        for _ in range(2 * longest * len(groups)):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, "the engine makes no progress"
        assert not self.requests, "a request has ended, and nobody was told"
        self.counts["evicted"] = self.engine.block_manager.prefix_cache.num_evicted
        self.counts["swapped blocks"] = self.runner.num_copied["swap_in"]

    def _pick(self, pick: int) -> str:
        return list(self.requests)[pick % len(self.requests)]

    def _unfinished(self) -> list[Sequence]:
        return [one for expected in self.requests.values() for one in expected.group.unfinished]

    def _num_begun(self) -> int:
        return sum(bool(one.block_table) for one in self._unfinished())

    # --- between the engine and the shadow runner ---------------------------------------------------------------

    def run(self, output: SchedulerOutput, times: StepTimes) -> SampledTokens:
        """Check what was scheduled, let the shadow runner compute it, and spoil a row if one is to fail."""
        self._check_turns(output)
        if self._twins_share and self.engine.config.enable_prefix_caching:
            self._check_twins(output)
        self._check_writes(output)
        self._check_drafts(output)
        self._count(output)
        sampled = self.runner.run(output, times)
        if self._fail_next is not None and output.sampling:
            position = self._fail_next % len(output.sampling)
            sampled.failed[position] = NO_CHOICE
            self._fail_next = None
            self.counts["failed"] += 1
        return sampled

    def close(self) -> None:
        """Nothing was started."""

    def _check_turns(self, output: SchedulerOutput) -> None:
        """Assert that every running sequence computes a token, unless it waits for others of its own request."""
        assert output.num_tokens <= self.engine.config.max_num_batched_tokens, "the budget is exceeded"
        limit = self.engine.config.long_prefill_threshold or output.num_tokens
        assert max(output.num_new_tokens, default=0) <= limit, "a prefill is longer than the threshold"
        computing = set(output.sequences)
        for sequence in self.engine.scheduler.running:
            if sequence not in computing and sequence.block_table:
                others = [one for one in sequence.group.unfinished if one is not sequence]
                others_lag = any(not one.block_table or one.remaining_tokens > 1 for one in others)
                waits = sequence.group.beams is not None and others_lag
                assert waits, f"{sequence.request_id} is starved"

    def _check_twins(self, output: SchedulerOutput) -> None:
        """Assert that sequences which begin in this step share the full blocks that they have in common."""
        size = self.engine.info.block_size
        begun = [
            (one, count - len(output.drafts.get(one, ())))
            for one, count in zip(output.sequences, output.num_new_tokens, strict=True)
            if one not in self._settled and not one.group.wants_prompt_logprobs
        ]
        # What fills a block with one generated token is published later, with others, even where it is computed again.
        begun = [
            (one, count)
            for one, count in begun
            if count > 1 or one.num_computed_tokens + count <= one.num_prompt_tokens
        ]
        for place, (first, num_first) in enumerate(begun):
            for second, num_second in begun[:place]:
                if first.cache_salt != second.cache_salt:
                    continue
                end = min(first.num_computed_tokens + num_first, second.num_computed_tokens + num_second)
                blocks = 0
                while (blocks + 1) * size <= end and (
                    first.token_ids[blocks * size : (blocks + 1) * size]
                    == second.token_ids[blocks * size : (blocks + 1) * size]
                ):
                    blocks += 1
                assert first.block_table[:blocks] == second.block_table[:blocks], "equal prompts get duplicate blocks"
                self.counts["shared in one step"] += blocks > 0

    def _check_writes(self, output: SchedulerOutput) -> None:
        """Assert that a shared block is written only while the others find it complete after this very step."""
        manager, size = self.engine.block_manager, self.engine.info.block_size
        for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
            first = max(sequence.num_computed_tokens, sequence.num_matched_tokens) // size
            last = (sequence.num_computed_tokens + count - 1) // size
            for index in range(first, last + 1):
                block_id = sequence.block_table[index]
                if manager.pool.blocks[block_id].ref_count > 1:
                    others = [
                        one
                        for one in self.engine.scheduler.running
                        if one is not sequence and block_id in one.block_table
                    ]
                    complete = all(one.num_matched_tokens >= (index + 1) * size for one in others)
                    assert complete, f"block {block_id} is written while others hold it"

    def _check_drafts(self, output: SchedulerOutput) -> None:
        """Assert that drafts are only where they belong, and take from nobody."""
        assert list(output.drafts) == [one for one in output.sequences if one in output.drafts]
        if output.drafts:
            assert not output.preempted, "somebody gives way to a draft"
            assert self.engine.block_manager.num_free_blocks >= 0
        for sequence, draft in output.drafts.items():
            params = sequence.params
            assert params.is_plain_greedy, "a draft for a sequence that draws"
            assert 0 < len(draft) <= self.engine.scheduler.drafter.num_tokens  # type: ignore[union-attr]
            assert sequence.num_tokens + len(draft) < sequence.max_total_tokens, "a draft goes beyond the answer's end"
            self.counts["tokens drafted"] += len(draft)

    def _watch_free(self, sequence: Sequence) -> None:
        """Free, and assert that prefixes will be evicted after what follows them."""
        table = list(sequence.block_table)
        self._free(sequence)
        members = set(table)
        freed = [block_id for block_id in self.engine.block_manager.pool._cached if block_id in members]
        assert freed == [block_id for block_id in reversed(table) if block_id in freed], "a prefix is evicted first"

    def _check_published(self) -> None:
        """Assert that what a block's hash claims is what its slots hold."""
        size, ends, slots = self.engine.info.block_size, self.runner.ids.ends, self.runner.slots
        for block in self.engine.block_manager.pool.blocks:
            if block.block_hash is None:
                continue
            held: object = slots.get(block.block_id * size + size - 1)
            assert self._hash_of(held) == block.block_hash, f"block {block.block_id} is published with foreign content"
            for slot in range(block.block_id * size + size - 2, block.block_id * size - 1, -1):
                assert isinstance(held, int)
                held = ends[held][0]
                assert slots.get(slot) == held, f"block {block.block_id} is published with foreign content"

    def _hash_of(self, prefix: object) -> int | None:
        """Return the hash of a prefix that fills blocks, given by identity or, if it is empty, by its salt."""
        if prefix is None:
            return None
        if prefix not in self._hashes:
            if isinstance(prefix, str):
                self._hashes[prefix] = root_hash(self.engine.info.model, "", prefix)
            else:
                parent, tokens = prefix, []
                while len(tokens) < self.engine.info.block_size:
                    if not isinstance(parent, int):
                        return None  # an empty or partial block
                    parent, token_id = self.runner.ids.ends[parent]
                    tokens.append(token_id)
                before = self._hash_of(parent)
                if before is None:
                    return None
                # Looked up in the module, where a test may have put a hash that collides.
                packed = pack_tokens(tokens[::-1])
                self._hashes[prefix] = prefix_cache_module.packed_block_hash(before, packed)
        return self._hashes[prefix]

    def _count(self, output: SchedulerOutput) -> None:
        counts = self.counts
        for group in output.preempted:
            counts["preempted by swap" if group.status is SequenceStatus.SWAPPED else "preempted to recompute"] += 1
        counts["copied on write"] += len(output.block_copies)
        counts["forked"] += len(output.forks)
        counts["of a group that comes back"] += sum(
            group.num_preemptions > 0 and group.params.num_sequences > 1 for group in output.admitted
        )
        counts["prefill beside decode"] += 1 in output.num_new_tokens and max(output.num_new_tokens) > 1
        counts["cached"] += sum(
            0 < one.num_cached_tokens == one.num_computed_tokens for one in output.sequences if one not in self._settled
        )

    # --- answers ------------------------------------------------------------------------------------------------

    def _undisturbed(self, prompt: list[int], group: SequenceGroup) -> list[list[int]]:
        params, salt = group.params, group.cache_salt
        if params.uses_beam_search:
            found = self.runner.search(prompt, params, group.max_total_tokens, salt)
            return [hypothesis.token_ids for hypothesis in found]
        return [self._draw(prompt, group, index) for index in range(params.num_sequences)]

    def _draw(self, prompt: list[int], group: SequenceGroup, index: int) -> list[int]:
        tokens = list(prompt)
        prefix: object = self.runner.ids.chain(group.cache_salt, prompt)[-1]
        while True:
            assert isinstance(prefix, int)
            tokens.append(next_token(prefix, index))
            count = len(tokens) - len(prompt)
            is_stopped = tokens[-1] in group.stop_token_ids and count > group.params.min_tokens
            if is_stopped or len(tokens) >= group.max_total_tokens:
                return tokens[len(prompt) :]
            prefix = self.runner.ids.chain(prefix, tokens[-1:])[0]

    def _is_told_at_once(self, output: EngineOutput) -> bool:
        return not self.requests[output.request_id].group.outputs_at_end

    def _hear(self, output: EngineOutput) -> None:
        expected = self.requests[output.request_id]
        assert 0 <= output.index < expected.group.params.n
        if expected.group.outputs_at_end:
            expected.held_back.append(output)
        else:
            self._check_answer(expected, output)
        if output.prompt_logprobs is not None:
            self._check_prompt_logprobs(expected, output)
        if output.is_last:
            assert expected.group.is_finished
            if expected.group.outputs_at_end:
                self._check_best(expected)
            self._texts.append(expected.prompt + expected.group.sequences[0].output_token_ids)
            del self.requests[output.request_id]
            self.counts["finished"] += 1

    def _check_answer(self, expected: Expected, output: EngineOutput) -> None:
        got = expected.got.setdefault(output.index, [])
        got += output.token_ids
        wanted = expected.answers[output.index]
        assert got == wanted[: len(got)], f"{output.request_id} answers {got} instead of {wanted}"
        if output.finish_reason is FinishReason.ABORT:
            self._check_abort(output)
        elif output.finish_reason is not None:
            assert got == wanted, f"{output.request_id} ends at {got} instead of {wanted}"
            self._check_reason(expected, output, wanted)
        else:
            assert len(got) < len(wanted), f"{output.request_id} goes on behind its end"

    def _check_abort(self, output: EngineOutput) -> None:
        is_dropped = str(output.stop_reason).startswith("the KV cache cannot hold all answers")
        assert output.stop_reason == NO_CHOICE or (is_dropped and not self._twins_share), output.stop_reason
        self.counts["dropped"] += is_dropped

    def _check_reason(self, expected: Expected, output: EngineOutput, tokens: list[int]) -> None:
        group = expected.group
        is_stop = tokens[-1] in group.stop_token_ids and (len(tokens) > group.params.min_tokens or group.beams)
        assert output.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _check_best(self, expected: Expected) -> None:
        """Compare the answers that are told at the end: beams, or the best of several."""
        group, outputs = expected.group, expected.held_back
        assert [output.index for output in outputs] == list(range(len(outputs)))
        has_failed = [one.has_failed for one in group.sequences]
        if group.beams is not None:
            self.counts["beam searches"] += 1
            wanted = expected.answers[: group.params.n]
            if any(has_failed):  # then it tells what it had found by then
                found = [hypothesis.token_ids for hypothesis in group.beams.hypotheses[: group.params.n]]
                wanted = [*found, *[[]] * (group.params.n - len(found))]
            assert [output.token_ids for output in outputs] == wanted
        else:
            self.counts["best of several"] += 1
            answers = [one.output_token_ids for one in group.sequences]
            for answer, whole, failed in zip(answers, expected.answers, has_failed, strict=True):
                assert answer == (whole[: len(answer)] if failed else whole)
            scores = [
                float("-inf") if failed else self._mean_logprob(expected, index, answer)
                for index, (answer, failed) in enumerate(zip(answers, has_failed, strict=True))
            ]
            best = sorted(range(len(answers)), key=lambda index: -scores[index])[: group.params.n]
            assert [output.token_ids for output in outputs] == [answers[index] for index in best]
        for output in outputs:
            if output.finish_reason is FinishReason.ABORT:
                self._check_abort(output)
            else:
                self._check_reason(expected, output, output.token_ids)

    def _mean_logprob(self, expected: Expected, index: int, answer: list[int]) -> float:
        chain = self.runner.ids.chain(expected.salt, expected.prompt + answer)[len(expected.prompt) - 1 : -1]
        return sum(token_logprob(prefix, index) for prefix in chain) / len(answer)

    def _check_prompt_logprobs(self, expected: Expected, output: EngineOutput) -> None:
        assert output.prompt_logprobs is not None
        chain = self.runner.ids.chain(expected.salt, expected.prompt)
        wanted = [token_logprob(prefix) for prefix in chain[:-1]]
        found = [one[token].logprob for one, token in zip(output.prompt_logprobs, expected.prompt, strict=True) if one]
        assert output.prompt_logprobs[0] is None
        assert found == wanted, "log-probabilities of prompt tokens are missing or twice there"
        self.counts["prompt logprobs"] += 1


# --- the seeded driver ----------------------------------------------------------------------------------------------


def random_params(rng: random.Random) -> SamplingParams:
    """Draw the parameters of a request."""
    common = {
        "max_tokens": rng.choice([1, 5, 10, 20, 40, None]),
        "stop_token_ids": rng.choice([[], [], [], [3], [1, 2, 3], list(range(0, 64, 8))]),
    }
    kind = rng.random()
    if kind < 0.2:
        width = rng.randint(1, 4)
        return SamplingParams(
            temperature=0,
            beam_width=width,
            n=rng.randint(1, width),
            length_penalty=rng.choice([-1.0, 0.0, 1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            **common,
        )
    n = rng.randint(2, 4) if kind < 0.45 else 1
    return SamplingParams(
        temperature=0 if n == 1 and kind >= 0.6 else 1,
        n=n,
        best_of=rng.randint(n, 4) if kind < 0.3 else None,
        prompt_logprobs=0 if rng.random() < 0.1 else None,
        min_tokens=0 if common["max_tokens"] is None else rng.randint(0, common["max_tokens"]),
        **common,
    )


def random_arrival(rng: random.Random) -> Arrival:
    """Draw a request. Few distinct tokens, so that prompts share prefixes by chance too."""
    return Arrival(
        tokens=[rng.randint(0, 1) for _ in range(rng.choice([1, 2, 4, 8, 16, 40]))],
        params=random_params(rng),
        extends=rng.randrange(30) if rng.random() < 0.5 else None,
        salt=rng.choice(["", "", "", "a"]),
        priority=rng.randint(-1, 1),
    )


def random_options(rng: random.Random) -> dict[str, object]:
    """Draw the options of an engine whose pool is scarce."""
    block_size = rng.choice([1, 2, 4, 8])
    return {
        "block_size": block_size,
        "num_blocks": rng.randint(3 + 8 // block_size, 6 + 64 // block_size),
        "num_host_blocks": rng.choice([0, 0, 8, 80]),
        "max_num_batched_tokens": rng.choice([1, 4, 8, 16, 40]),
        "max_num_seqs": rng.choice([1, 4, 8, 12]),
        "enable_prefix_caching": rng.random() < 0.75,
        "long_prefill_threshold": rng.choice([0, 0, 3]),
        "num_draft_tokens": rng.choice([0, 1, 4, 20]),
        "free_tokens": rng.choice([None, 1, 4, 10]),
    }


def lone_arrival(rng: random.Random) -> Arrival:
    """Draw a request for one answer."""
    return replace(
        random_arrival(rng), params=SamplingParams(temperature=0, max_tokens=rng.choice([1, 5, 10, 20, 40, None]))
    )


def drive(
    seed: int, num_steps: int = 120, draw: Callable[[random.Random], Arrival] = random_arrival, **options: object
) -> RandomLoad:
    """Put a random load on an engine and see it through to the end; ``options`` go before what is drawn."""
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
