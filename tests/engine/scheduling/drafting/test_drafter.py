"""Drafter: which sequences get drafts, which tokens and blocks these take, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from engine.engine import Engine
from engine.options.thinking_budget import ThinkingBudget
from engine.outputs import EngineOutput, FinishReason
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.drafter import accepted_tokens
from engine.scheduling.drafting.payoff import Payoff
from engine.scheduling.drafting.proposer import Proposer
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from tests.engine.shadow import ShadowRunner, check_integrity, make_engine, run_to_end
from tests.engine.shadow_model import next_token

PROMPT = [3, 1, 4, 1, 5]


class Oracle(Proposer):
    """Proposes the right tokens, except at the positions of an answer that are given as wrong."""

    def __init__(self, runner: ShadowRunner, wrong: Collection[int]) -> None:
        self._runner, self._wrong = runner, wrong

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        answer = self._runner.answer(sequence.token_ids, limit, sequence.cache_key)
        first = sequence.num_output_tokens
        return [token + (first + index in self._wrong) for index, token in enumerate(answer)]


def start(num_draft_tokens: int, *, wrong: Collection[int] = (), **options: Any) -> tuple[Engine, ShadowRunner]:
    speculation = {"method": "ngram", "num_speculative_tokens": num_draft_tokens}
    engine, runner = make_engine(speculative_config=speculation, **options)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.proposers = {"test": Oracle(runner, wrong)}
    return engine, runner


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **params)


def watch(engine: Engine) -> list[SchedulerOutput]:
    """Return a list to which every scheduled batch is added."""
    seen: list[SchedulerOutput] = []
    schedule = engine.scheduler.schedule

    def watching() -> SchedulerOutput:
        seen.append(schedule())
        return seen[-1]

    engine.scheduler.schedule = watching  # type: ignore[method-assign]
    return seen


def joined(steps_outputs: list[list[EngineOutput]]) -> list[int]:
    """Return the tokens of all steps."""
    return [token_id for outputs in steps_outputs for output in outputs for token_id in output.token_ids]


def steps(engine: Engine) -> list[list[EngineOutput]]:
    """Step to the end; return the outputs of each step."""
    outputs = []
    while engine.has_unfinished:
        outputs.append(engine.step())
        check_integrity(engine)
    return outputs


@pytest.mark.parametrize(
    ("draft", "after_draft", "expected"),
    [
        ([1, 2, 3], [2, 3, 4], [2, 3, 4]),  # the whole draft is right, and one more token follows
        ([1, 2, 3], [2, 9, 4], [2, 9]),
        ([1, 2, 3], [9, 3, 4], [9]),
        ([7, 2, 3], [2, 3, 4], []),
        ([1, 2, 3], [2], [2]),  # the model gives no token after the second
        ([1, 2, 3], [], []),
    ],
)
def test_draft_tokens_are_accepted_as_far_as_the_model_agrees(
    draft: list[int], after_draft: list[int], expected: list[int]
) -> None:
    assert list(accepted_tokens(1, draft, after_draft)) == expected


def test_right_drafts_give_several_tokens_a_step() -> None:
    engine, runner = start(4)
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=12)))
    outputs = steps(engine)
    assert [len(output.token_ids) for (output,) in outputs] == [1, 5, 5, 1]  # the first one is the prefill's
    assert joined(outputs) == runner.answer(PROMPT, 12)


def test_one_token_that_the_batch_leaves_is_enough_for_a_draft() -> None:
    engine, runner = start(4, max_num_batched_tokens=2)
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=7)))
    outputs = steps(engine)
    assert [len(output.token_ids) for (output,) in filter(None, outputs)] == [2, 2, 2, 1]
    assert joined(outputs) == runner.answer(PROMPT, 7)


@pytest.mark.parametrize("wrong", [{1}, {2}, {3, 4}, set(range(40))])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_wrong_drafts_change_nothing(wrong: set[int], block_size: int) -> None:
    engine, runner = start(4, wrong=wrong, block_size=block_size)
    for name in ("a", "b"):  # the second request hits the blocks that the first published
        engine.add_request(EngineRequest(name, PROMPT, greedy(max_tokens=30)))
        outputs = steps(engine)
        assert joined(outputs) == runner.answer(PROMPT, 30)
        assert len(outputs) < 30 or len(wrong) == 40


def test_no_token_follows_a_stop_token_in_a_right_draft() -> None:
    expected = make_engine()[1].answer(PROMPT, 12)
    stop = expected[3]
    assert stop not in expected[:3]
    for eos, params in (((stop,), greedy(max_tokens=12)), ((), greedy(max_tokens=12, stop_token_ids=[stop]))):
        engine, _ = start(8, block_size=4, eos_token_ids=eos)
        engine.add_request(EngineRequest("a", PROMPT, params))
        seen = watch(engine)
        outputs = steps(engine)
        assert [output.token_ids for (output,) in outputs] == [expected[:1], expected[1:4]]
        (last,) = outputs[-1]
        assert (last.finish_reason, last.is_last) == (FinishReason.STOP, True)
        assert last.stop_reason == (None if eos else stop)
        assert list(seen[-1].num_accepted.values()) == [2]
        # The prompt's 5 tokens and the answer's first 3 are computed: two blocks, and nothing of the draft.
        assert len(engine.block_manager.prefix_cache.published_hashes()) == 2


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_a_draft_ends_before_the_answer_does(max_tokens: int) -> None:
    engine, runner = start(20, max_model_len=10)
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=max_tokens)))
    seen = watch(engine)
    count = min(max_tokens, 5)
    assert run_to_end(engine) == {"a": runner.answer(PROMPT, count)}
    assert sum(output.num_draft_tokens for output in seen) == max(0, count - 2)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"bad_words_token_ids": ((3, 4),)},
        {"logprobs": 0},
        {"thinking_budget": ThinkingBudget(20, 9)},
        {"temperature": 1, "n": 2},
        {"temperature": 1, "best_of": 2},
        {"min_tokens": 8, "stop_token_ids": [1]},
    ],
    ids=repr,
)
def test_sequences_with_any_parameters_get_drafts(params: dict[str, Any]) -> None:
    engine, _ = start(4)
    seen = watch(engine)
    engine.add_request(EngineRequest("a", PROMPT, SamplingParams(**{"temperature": 0, "max_tokens": 8} | params)))
    steps(engine)
    drafted = {sequence.index for output in seen for sequence in output.drafts}
    assert drafted == set(range(params.get("n") or params.get("best_of") or 1))


@pytest.mark.parametrize("beam_width", [1, 2])
def test_beams_get_no_drafts(beam_width: int) -> None:
    engine, _ = start(4)
    seen = watch(engine)
    engine.add_request(EngineRequest("beams", PROMPT, greedy(max_tokens=8, beam_width=beam_width)))
    engine.add_request(EngineRequest("greedy", PROMPT, greedy(max_tokens=8)))
    steps(engine)
    assert {sequence.request_id for output in seen for sequence in output.drafts} == {"greedy"}


def test_drafts_get_only_tokens_that_the_batch_leaves() -> None:
    """Each sequence has its token and each prefill its chunk, as without drafts; the rest goes to drafts in order."""
    engine, _ = start(4, max_num_batched_tokens=12, max_num_seqs=3)
    for name in "ab":
        engine.add_request(EngineRequest(name, PROMPT, greedy(max_tokens=50)))
    engine.step()
    seen = watch(engine)
    engine.step()
    assert seen[-1].num_new_tokens == [5, 5]
    engine.add_request(EngineRequest("long", [7] * 30, greedy(max_tokens=1)))
    for _ in range(2):
        engine.step()
        assert seen[-1].num_new_tokens == [1, 1, 10]
    engine.step()
    assert seen[-1].num_new_tokens == [1, 1, 10]
    engine.step()
    assert seen[-1].num_new_tokens == [5, 5]


def test_a_draft_is_no_longer_than_the_budget_or_the_threshold() -> None:
    for options, size in (({"max_num_batched_tokens": 3}, 3), ({"long_prefill_threshold": 2}, 2)):
        engine, _ = start(9, **options)
        engine.add_request(EngineRequest("a", [1], greedy(max_tokens=30)))
        engine.step()
        seen = watch(engine)
        engine.step()
        assert seen[-1].num_new_tokens == [size]


def test_drafts_take_no_blocks_that_the_next_step_needs() -> None:
    """Two sequences in a pool of 8 blocks: 4 are in use, each may need one in the next step, so drafts get two."""
    engine, _ = start(12, num_blocks=8, block_size=4, enable_prefix_caching=False, wrong=set(range(99)))
    for name in "ab":
        engine.add_request(EngineRequest(name, PROMPT, greedy(max_tokens=3 + 10)))
    engine.step()
    seen = watch(engine)
    engine.step()
    # 6 tokens of 2 blocks each are known; the first draft takes both blocks, the second one what is left in its last.
    assert list(map(len, seen[-1].drafts.values())) == [10, 2]
    assert [len(sequence.block_table) for sequence in engine.scheduler.running] == [2, 2], "drafts keep blocks"
    assert engine.block_manager.num_free_blocks == 4


class Counting(Proposer):
    """Counts how often it is asked; proposes a token."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        self.num_asked += 1
        return [0][:limit]


@pytest.mark.parametrize(("num_sequences", "asks"), [(1, True), (4, True), (5, False), (8, False)])
def test_where_drafts_pay_for_none_of_many_no_proposer_is_asked(
    num_sequences: int, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token takes as long as the last one, so no draft token is worth its time."""
    engine, _ = start(4, enable_prefix_caching=False)  # all prompts are computed in the first step
    drafter, proposer, payoff = engine.scheduler.drafter, Counting(), Payoff(1)
    assert drafter is not None
    for num_tokens in range(256, 0, -1):
        payoff.record_step(num_tokens, float(num_tokens))
    drafter.proposers, drafter.payoff = {"test": proposer}, payoff
    monkeypatch.setattr(drafter, "record_step", lambda output, seconds: None)
    for index in range(num_sequences):
        engine.add_request(EngineRequest(str(index), PROMPT, greedy(max_tokens=30)))
    seen = watch(engine)
    run_to_end(engine)
    assert bool(proposer.num_asked) == asks
    assert sum(output.num_draft_tokens for output in seen) == 0


@pytest.mark.parametrize(("price", "most_empty"), [(1.0, 0), (0.001, 6)], ids=["not tried", "tried now and then"])
def test_steps_overlap_where_drafts_pay_for_none_of_many(
    price: float, most_empty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that wait for their tokens are left out of a step. Each token costs time, and no draft is right."""
    engine, _ = start(4, wrong=range(100), enable_prefix_caching=False, async_scheduling=True)
    drafter, payoff = engine.scheduler.drafter, Payoff(1)
    assert drafter is not None
    for num_tokens in range(256, 0, -1):
        payoff.record_step(num_tokens, 1.0 + price * num_tokens)
    drafter.payoff = payoff
    monkeypatch.setattr(drafter, "record_step", lambda output, seconds: None)
    monkeypatch.setattr(drafter.acceptance, "_mean", 0.0005)  # with which new sequences begin
    for index in range(8):
        engine.add_request(EngineRequest(str(index), PROMPT, greedy(max_tokens=90)))
    seen = watch(engine)
    for _ in range(24):
        engine.step()
    assert {len(output.sequences) for output in seen} <= {0, 8}
    assert sum(output.is_empty for output in seen) <= most_empty


def test_many_sequences_get_drafts_again_when_these_pay() -> None:
    engine, runner = start(4)
    drafter = engine.scheduler.drafter
    assert drafter is not None
    for index in range(8):
        engine.add_request(EngineRequest(str(index), PROMPT, greedy(max_tokens=60)))
    seen = watch(engine)
    for free_tokens, expected in ((1, False), (None, True)):
        drafter.payoff = Payoff(free_tokens)
        drafter.record_step = lambda output, seconds: None  # type: ignore[method-assign]
        for num_tokens in range(256, 0, -1):
            drafter.payoff.record_step(num_tokens, float(num_tokens) if free_tokens else 1.0)
        first = len(seen)
        for _ in range(9):
            engine.step()
        assert any(output.num_draft_tokens for output in seen[first:]) == expected
    assert set(map(tuple, run_to_end(engine).values())) <= {
        tuple(runner.answer(PROMPT, 60))[-length:] for length in range(61)
    }


@pytest.mark.parametrize("swap", [0, 64])
def test_drafts_cause_no_preemption(swap: int) -> None:
    """Wrong drafts, none accepted, in a pool that is always nearly full: the same preemptions as without drafts."""
    preemptions = []
    for num_draft_tokens in (0, 8):
        options: dict[str, Any] = {"num_blocks": 24, "block_size": 2, "num_host_blocks": swap}
        if num_draft_tokens:
            engine, _ = start(num_draft_tokens, wrong=set(range(99)), **options)
        else:
            engine, _ = make_engine(**options)
        seen = watch(engine)
        for index in range(6):
            engine.add_request(EngineRequest(str(index), [index] * 7, greedy(max_tokens=16)))
        run_to_end(engine)
        preemptions.append([(step, len(output.preempted)) for step, output in enumerate(seen) if output.preempted])
        assert num_draft_tokens == 0 or sum(output.num_draft_tokens for output in seen) > 50
    assert preemptions[0] == preemptions[1] != []


def test_a_block_is_published_when_its_tokens_are_known_and_not_before() -> None:
    engine, _ = start(8, block_size=2, wrong={4})
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=40)))
    sequence = engine.scheduler.waiting[-1].sequences[0]
    while not sequence.is_finished:
        engine.step()
        known = {sequence.block_hash(index, 2) for index in range(sequence.num_tokens // 2)}
        assert set(engine.block_manager.prefix_cache.published_hashes()) <= known
    assert len(engine.block_manager.prefix_cache.published_hashes()) == (5 + 40 - 1) // 2


def test_a_sequence_that_fails_beside_its_draft_keeps_the_tokens_it_had() -> None:
    engine, runner = start(4)
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=20)))
    engine.step()
    compute = runner.run

    def fail(output: SchedulerOutput, times: Any) -> Any:
        sampled = compute(output, times)
        assert output.drafts
        sampled.failed[0] = "no choice"
        return sampled

    engine.runner.run = fail  # type: ignore[method-assign]
    (output,) = engine.step()
    assert (output.token_ids, output.finish_reason, output.is_last) == ([], FinishReason.ABORT, True)
    check_integrity(engine)


def test_drafts_end_where_the_model_gives_no_token() -> None:
    """A NaN after the second draft token: two tokens come now, and the next step computes the rest again."""
    engine, runner = start(4)
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=9)))
    engine.step()
    compute = runner.run

    def cut(output: SchedulerOutput, times: Any) -> Any:
        sampled = compute(output, times)
        sampled.after_drafts = {sequence: tokens[:1] for sequence, tokens in sampled.after_drafts.items()}
        return sampled

    engine.runner.run = cut  # type: ignore[method-assign]
    assert [len(output.token_ids) for (output,) in steps(engine)] == [2, 2, 2, 2]


def test_prompt_logprobs_come_once_with_the_first_tokens() -> None:
    """The prompt's last token may be computed alone, beside the first draft."""
    engine, _ = start(4, max_num_batched_tokens=4)
    engine.add_request(EngineRequest("a", PROMPT, greedy(max_tokens=9, prompt_logprobs=0)))
    outputs = [output for step_outputs in steps(engine) for output in step_outputs]
    assert [len(output.token_ids) for output in outputs] == [4, 4, 1]
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]
    assert len(outputs[0].prompt_logprobs or ()) == len(PROMPT)


def test_a_resumed_request_outputs_only_new_tokens() -> None:
    engine, runner = start(4)
    answer = runner.answer(PROMPT, 12)
    engine.queue_request(EngineRequest("a", PROMPT, greedy(max_tokens=12), output_token_ids=answer[:3]))
    assert joined(steps(engine)) == answer[3:]


def test_draft_tokens_do_not_count_as_prefill_of_a_step() -> None:
    engine, _ = start(100, max_num_batched_tokens=500)
    for index in range(4):
        engine.add_request(EngineRequest(str(index), PROMPT, greedy(max_tokens=300)))
    steps(engine)
    assert engine.meter.load().prefill_tokens_per_s == 0
    assert engine.meter.load().step_costs.seconds(0, 4, 4 * len(PROMPT)) > 0


def test_prompt_lookup_makes_an_echo_fast() -> None:
    """With the configured proposer and a model that repeats the prompt from its first token on."""
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    engine, runner = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    run = runner.run

    def echo(output: SchedulerOutput, times: Any) -> Any:
        sampled = run(output, times)
        for position, sequence in enumerate(output.sampling):
            known = sequence.num_tokens
            draft = output.drafts.get(sequence, [])
            echoed = [prompt[(known + i) % len(prompt)] for i in range(1 + len(draft))]
            sampled.token_ids[position] = echoed[0]
            if draft:
                sampled.after_drafts[sequence] = echoed[1:]
        return sampled

    runner.run = echo  # type: ignore[method-assign]
    engine.add_request(EngineRequest("a", prompt, greedy(max_tokens=30)))
    outputs = steps(engine)
    assert joined(outputs) == prompt * 3
    assert [len(output.token_ids) for (output,) in outputs] == [1, 1, 1, 5, 5, 5, 5, 5, 2]
    assert next_token(0) != prompt[0]  # the shadow runner itself would sample another token
