"""The comparison of answers with and without drafts finds planted faults of verification.

Faults of blocks and queues are planted in ``tests/engine/scheduling/test_planted_step_bugs.py``: blocks of rejected
tokens that are published, one accepted token too many, and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from engine.sampling.token_rows import TokenRows
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting import drafter as drafter_module
from engine.scheduling.drafting.continuations import continuations_of
from engine.scheduling.drafting.drafter import accepted_tokens
from engine.scheduling.scheduler_output import SampledTokens
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence
from engine.structured_outputs.grammar import Grammar
from kernels.cpu.library import library
from tests.engine.scheduling.drafting import test_drafter
from tests.engine.scheduling.drafting.test_same_answers import GRAMMARS, Engines, check_same

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

Plant = Callable[[pytest.MonkeyPatch], None]
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=1)
PENALISED = SamplingParams(
    temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=24, ignore_eos=True
)
FORMED = [SamplingParams(temperature=0.7, seed=5, max_tokens=24, structured_outputs=form) for form in GRAMMARS]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines("float32")
    yield engines
    engines.close()


def assert_found(engines: Engines, plant: Plant, requests: list[SamplingParams]) -> None:
    """Assert that answers are the same without the fault, and other ones with it."""
    check_same(engines, requests, ("truth", "mixed"))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError, match="small|overlapping|paying"):
            check_same(engines, requests, ("truth", "mixed"))


def test_noise_of_the_wrong_position(engines: Engines) -> None:
    continued = Sequence.continued

    def one_later(sequence: Sequence, token_ids: list[int], grammar: Grammar | None) -> Sequence:
        later = continued(sequence, token_ids, grammar)
        later.num_pending = 1
        return later

    assert_found(engines, lambda patch: patch.setattr(Sequence, "continued", one_later), [DRAWN])


def test_logits_of_the_wrong_position(engines: Engines) -> None:
    take_after_drafts = SampledTokens.take_after_drafts

    def one_later(sampled: SampledTokens, drafts: dict[Sequence, list[int]]) -> None:
        first = len(sampled.token_ids) - sum(map(len, drafts.values()))
        sampled.token_ids[first:] = [*sampled.token_ids[first + 1 :], sampled.token_ids[first]]
        take_after_drafts(sampled, drafts)

    assert_found(engines, lambda patch: patch.setattr(SampledTokens, "take_after_drafts", one_later), [DRAWN])


def test_penalties_of_rejected_tokens_that_stay(engines: Engines) -> None:
    drafts: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()
    add_draft, missing = StepBuilder.add_draft, TokenRows._missing

    def note(step: StepBuilder, index: int, draft: list[int], *rest: Any) -> None:
        drafts[step.running[index]] = draft
        add_draft(step, index, draft, *rest)

    def with_drafted(rows: TokenRows, sequence: Sequence, num_known: int) -> list[int]:
        return missing(rows, sequence, num_known) + drafts.pop(sequence, [])

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StepBuilder, "add_draft", note)
        patch.setattr(TokenRows, "_missing", with_drafted)

    assert_found(engines, plant, [PENALISED])


def test_penalties_that_do_not_see_accepted_drafts(engines: Engines) -> None:
    missing = TokenRows._missing

    def without_last(rows: TokenRows, sequence: Sequence, num_known: int) -> list[int]:
        return missing(rows, sequence, num_known) if sequence.block_table else sequence.token_ids[:-2]

    assert_found(engines, lambda patch: patch.setattr(TokenRows, "_missing", without_last), [PENALISED])


def test_a_matcher_that_is_not_rolled_back(engines: Engines) -> None:
    def advance_own(sequence: Sequence, draft: list[int]) -> list[Sequence]:
        continuations = continuations_of(sequence, draft)
        if continuations and (last := continuations[-1].grammar) is not None:
            sequence.grammar = last.fork()
        return continuations

    assert_found(engines, lambda patch: patch.setattr(drafter_module, "continuations_of", advance_own), FORMED)


def test_a_matcher_that_does_not_see_the_draft(engines: Engines) -> None:
    continued = Sequence.continued

    def with_own(sequence: Sequence, token_ids: list[int], grammar: Grammar | None) -> Sequence:
        return continued(sequence, token_ids, sequence.grammar and sequence.grammar.fork())

    assert_found(engines, lambda patch: patch.setattr(Sequence, "continued", with_own), FORMED)


def test_log_probabilities_that_are_not_kept(engines: Engines) -> None:
    assert_found(
        engines,
        lambda patch: patch.setattr(drafter_module, "record_logprobs", lambda sequence, logprobs: None),
        [DRAWN],
    )


def test_a_dropped_bonus_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same then, and takes more steps."""
    test_drafter.test_right_drafts_give_several_tokens_a_step()
    monkeypatch.setattr(drafter_module, "accepted_tokens", lambda *args: list(accepted_tokens(*args))[:-1])
    with pytest.raises(AssertionError):
        test_drafter.test_right_drafts_give_several_tokens_a_step()
