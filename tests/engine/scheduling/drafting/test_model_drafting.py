"""ModelDrafting: drafts of a model where its passes pay, and blocks that are returned where no draft comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting.acceptance import Acceptance
from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.scheduling.drafting.drafter import Drafter
from engine.scheduling.drafting.model_drafting import ModelDrafting
from engine.scheduling.drafting.payoff import Payoff
from engine.sequence import Sequence, SequenceGroup
from tests.engine.shadow import ShadowRunner, check_integrity, make_engine

PROMPT = [3, 1, 4, 1, 5]


class FakeModel:
    """Knows the answers of a shadow model, or nothing; its passes take the seconds that it is given."""

    max_len, free_tokens = 40, 8

    def __init__(self, seconds: float = 0.0, runner: ShadowRunner | None = None, share: float = 0.1) -> None:
        self.seconds, self.share = seconds, share
        self.computed: dict[Sequence, int] = {}
        self.most_filled: list[int | None] = []
        self.longest = 0  # tokens with the draft
        self._runner = runner

    def num_computed(self, sequence: Sequence) -> int:
        return self.computed.get(sequence, 0)

    def fill(self, ends: Mapping[Sequence, int], max_tokens: int | None = None) -> ModelDrafts:
        self.most_filled.append(max_tokens)
        self.computed.update(ends)
        return ModelDrafts()

    def draft(self, lengths: Mapping[Sequence, int]) -> ModelDrafts:
        self.longest = max(self.longest, *(sequence.num_tokens + count for sequence, count in lengths.items()))
        self.computed.update({sequence: sequence.num_tokens for sequence in lengths})
        passes = [(len(lengths), self.seconds)] * max(lengths.values())
        return ModelDrafts({sequence: self._answer(sequence, n) for sequence, n in lengths.items()}, passes)

    def _answer(self, sequence: Sequence, count: int) -> list[int]:
        return [] if self._runner is None else self._runner.answer(sequence.token_ids, count, sequence.cache_key)


def make_sequence(num_tokens: int = 20, max_total_tokens: int = 999) -> Sequence:
    request = EngineRequest("a", [1] * num_tokens, SamplingParams())
    group = SequenceGroup(
        request, arrival=0, root=0, stop_token_ids=frozenset(), max_total_tokens=max_total_tokens, seed=0
    )
    return group.sequences[0]


def measured(seconds: float = 0.1) -> Payoff:
    """Steps of up to eight tokens take the same time, larger ones in proportion."""
    payoff = Payoff(8)
    for num_tokens in range(64, 0, -1):
        payoff.record_step(num_tokens, seconds * max(1, num_tokens / 8))
    return payoff


def lengths(model: FakeModel, payoff: Payoff | None, num_sequences: int = 1, rate: float | None = None) -> list[int]:
    """Return how many tokens are drafted for sequences, when the costs of passes are known."""
    acceptance = Acceptance()
    drafting = ModelDrafting(model, acceptance)
    sequences = [make_sequence() for _ in range(num_sequences)]
    if rate is not None:
        for sequence in sequences:
            for step in range(200):
                acceptance.record_outcome(sequence, step % 10 < rate * 10, 1)
    if model.seconds:
        drafting.draft({make_sequence(): 1})
    chosen = drafting.lengths(dict.fromkeys(sequences, 6), payoff, num_sequences, float(num_sequences))
    return list(chosen.values())


def test_the_time_of_passes_ends_drafts() -> None:
    """Of 0.1 s for a step: drafts get shorter with the cost of a pass, and end."""
    drafted = [sum(lengths(FakeModel(seconds), measured())) for seconds in (0.001, 0.01, 0.03, 0.06, 0.2)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] >= 5
    assert 0 < drafted[2] < drafted[0]
    assert drafted[-1] == 0


def test_before_a_pass_is_measured_the_size_of_the_weights_tells_its_cost() -> None:
    assert sum(lengths(FakeModel(share=0.01), measured())) >= 5
    assert sum(lengths(FakeModel(share=0.9), measured())) == 0


def test_drafts_that_are_seldom_right_end() -> None:
    assert sum(lengths(FakeModel(0.02), measured(), rate=0.9)) > 2
    assert sum(lengths(FakeModel(0.02), measured(), rate=0.0)) == 0


def test_a_full_batch_drafts_nothing() -> None:
    assert lengths(FakeModel(0.01), measured(), num_sequences=4) != []
    assert lengths(FakeModel(0.01), measured(), num_sequences=24) == []


def test_without_payoff_as_many_as_fit_are_drafted() -> None:
    assert lengths(FakeModel(9.0), None, num_sequences=3) == [6, 6, 6]


def test_a_step_without_drafts_is_measured_first() -> None:
    assert lengths(FakeModel(0.001), Payoff(8)) == []


def test_only_while_drafts_pay_the_model_follows_prompts() -> None:
    model, acceptance = FakeModel(9.0), Acceptance()
    drafting, sequence = ModelDrafting(model, acceptance), make_sequence(21)
    assert drafting.is_on
    drafting.draft({make_sequence(): 1})
    assert drafting.lengths({sequence: 6}, measured(), 1, 1.0) == {}
    assert not drafting.is_on
    model.seconds = 0.0001
    for _ in range(60):
        drafting.draft({make_sequence(): 1})
    assert drafting.lengths({sequence: 6}, measured(), 1, 1.0) != {}
    assert drafting.is_on


def test_sequences_that_lag_join_the_drafts_a_few_in_each_step() -> None:
    """Each of four lacks 40 tokens; a pass of 64 takes as long as the step."""
    model, acceptance = FakeModel(0.0125), Acceptance()
    drafting = ModelDrafting(model, acceptance)
    drafting.draft({make_sequence(): 1})
    sequences = [make_sequence() for _ in range(4)]
    for sequence in sequences:
        for _ in range(200):
            acceptance.record_outcome(sequence, 1, 1)
        sequence.token_ids += [1] * 20
    model.max_len = 999
    for count in (1, 2, 3, 4):
        chosen = drafting.lengths(dict.fromkeys(sequences, 2), measured(), 1, 4.0)
        assert drafting.is_on
        assert set(chosen) == set(sequences[:count])
        drafting.draft(chosen)
        for sequence in chosen:
            sequence.token_ids.append(1)


def test_what_does_not_pay_is_tried_the_less_often_the_more_it_costs() -> None:
    tries = []
    for seconds in (0.02, 0.2):
        model, acceptance, sequence = FakeModel(seconds), Acceptance(), make_sequence()
        drafting = ModelDrafting(model, acceptance)
        drafting.draft({make_sequence(): 1})
        for _ in range(200):
            acceptance.record_outcome(sequence, 0, 1)
        count = 0
        for _ in range(2000):
            sequence.token_ids.append(1)
            model.computed[sequence] = sequence.num_tokens - 1
            count += sum(drafting.lengths({sequence: 6}, measured(), 1, 1.0).values())
        tries.append(count)
    assert tries[0] > 2 * tries[1] > 0
    assert tries[0] * 0.02 < 0.03 * 2000 * 0.1  # of the time of all steps


def test_which_sequences_it_catches_up_with() -> None:
    model = FakeModel()
    model.max_len = 5000
    drafting = ModelDrafting(model, Acceptance())
    prompt, decoding, late = make_sequence(3000, 9999), make_sequence(), make_sequence()
    ending = make_sequence(800, 810)
    prompt.num_computed_tokens = 1000
    late.token_ids += [1] * 600
    for sequence in (decoding, late, ending):
        sequence.num_computed_tokens = sequence.num_tokens - 1
    computed = {sequence: sequence.num_computed_tokens for sequence in (prompt, decoding, late, ending)}
    assert set(drafting.lagging(computed)) == {prompt, late}
    model.max_len = 900
    assert set(drafting.lagging(computed)) == {late}


def test_catching_up_takes_no_longer_than_the_step() -> None:
    """A pass of eight tokens takes a tenth of a step of as many; further tokens of both in proportion."""
    model = FakeModel(0.01)
    model.max_len = 5000
    drafting, sequence = ModelDrafting(model, Acceptance()), make_sequence(3000, 9999)
    drafting.draft({make_sequence(): 1})
    sequence.num_computed_tokens = 2900
    for payoff, num_tokens in ((measured(), 1), (measured(), 64), (None, 1)):
        model.computed.clear()
        drafting.fill({sequence: 2900}, payoff, num_tokens)
    assert model.most_filled == [64, 512, None]
    drafting.fill({sequence: 2900}, measured(), 1)  # nothing is left
    assert len(model.most_filled) == 3


def start(model: FakeModel, runner: ShadowRunner, engine: Engine) -> None:
    drafter = engine.scheduler.drafter
    assert drafter is not None
    drafter.proposers, drafter.model = {}, ModelDrafting(model, drafter.acceptance)


def drafter_of(engine: Engine) -> Drafter:
    drafter = engine.scheduler.drafter
    assert drafter is not None
    assert drafter.model is not None
    return drafter


def test_in_a_full_batch_in_which_drafts_do_not_pay_the_model_follows_no_prompt() -> None:
    engine, runner = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    model = FakeModel(0.001, runner)
    start(model, runner, engine)
    drafter, drafting = drafter_of(engine), drafter_of(engine).model
    assert drafting is not None
    drafter.payoff = Payoff(1)
    for _ in range(2):
        for num_tokens in range(64, 0, -1):
            drafter.payoff.record_step(num_tokens, float(num_tokens**2))
    drafter.record_step = lambda *args: None  # type: ignore[method-assign]
    for index in range(8):
        engine.add_request(EngineRequest(str(index), [*PROMPT, index], SamplingParams(temperature=0, max_tokens=40)))
    for _ in range(12):
        engine.step()
    assert not drafting.is_on
    num_fills = len(model.most_filled)
    engine.add_request(EngineRequest("late", PROMPT * 3, SamplingParams(temperature=0, max_tokens=40)))
    for _ in range(9):
        engine.step()
    assert not drafting.is_on
    assert len(model.most_filled) == num_fills


def test_a_sequence_that_the_model_is_not_asked_for_has_missed_no_draft() -> None:
    """While a step without drafts is measured, for one."""
    engine, runner = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    start(FakeModel(0.001, runner), runner, engine)
    drafter = drafter_of(engine)
    drafter.payoff = Payoff(8)
    drafter.record_step = lambda *args: None  # type: ignore[method-assign]
    group = engine.add_request(EngineRequest("a", PROMPT, SamplingParams(temperature=0, max_tokens=30)))
    while engine.has_unfinished:
        assert drafter.acceptance.may_get_draft(group.sequences[0])
        engine.step()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("knows", [True, False])
def test_blocks_are_returned_whatever_comes_of_the_draft(block_size: int, knows: bool) -> None:
    options: dict[str, Any] = {"block_size": block_size, "num_blocks": 256 // block_size}
    engine, runner = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **options)
    model = FakeModel(runner=runner if knows else None)
    start(model, runner, engine)
    groups = [
        engine.add_request(EngineRequest(str(i), [*PROMPT, i], SamplingParams(temperature=0, max_tokens=40)))
        for i in range(3)
    ]
    steps = 0
    while engine.has_unfinished:
        engine.step()
        check_integrity(engine)
        steps += 1
        for sequence in (group.sequences[0] for group in groups):
            if not sequence.is_finished:
                held = len(sequence.block_table)
                assert held <= engine.block_manager.num_blocks_for(sequence.num_tokens)
    for group in groups:
        sequence = group.sequences[0]
        assert sequence.output_token_ids == runner.answer(sequence.token_ids[: len(PROMPT) + 1], 40)
    assert 30 < model.longest <= model.max_len
    assert (steps < 25) == knows
