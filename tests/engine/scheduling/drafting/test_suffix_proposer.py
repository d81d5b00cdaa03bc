"""SuffixProposer: drafts from the sequence itself and from earlier answers, which no other cache salt ever sees."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from engine.engine import Engine
from engine.options.speculative_config import SpeculativeConfig
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting import earlier_answers
from engine.scheduling.drafting.earlier_answers import EarlierAnswers
from engine.scheduling.drafting.suffix_index import SuffixIndex
from engine.scheduling.drafting.suffix_proposer import SuffixProposer
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence, SequenceGroup
from tests.engine.scheduling.drafting.test_drafter import joined, steps, watch
from tests.engine.shadow import make_engine

PROMPT = [3, 1, 4, 1, 5]


def proposer(**options: Any) -> SuffixProposer:
    named = {f"suffix_decoding_{name}": value for name, value in options.items()}
    return SuffixProposer(SpeculativeConfig.from_options({"method": "suffix", **named}))


def sequence_of(prompt: list[int], answer: list[int] | tuple[int, ...] = (), salt: str = "", **params: Any) -> Sequence:
    request = EngineRequest(
        "a", prompt, SamplingParams(temperature=0, **params), cache_salt=salt, output_token_ids=list(answer)
    )
    group = SequenceGroup(request, arrival=0, root=0, stop_token_ids=frozenset(), max_total_tokens=9999, seed=0)
    return group.sequences[0]


def learnt(
    answer: list[int], *more: list[int], salt: str = "", prompt: list[int] = PROMPT, **options: Any
) -> SuffixProposer:
    suffixes = proposer(**options)
    for known in (answer, *more):
        suffixes.learn(sequence_of(prompt, known, salt).group)
    return suffixes


def test_the_same_prompt_drafts_the_earlier_answer_from_its_first_token_on() -> None:
    suffixes = learnt([20, 21, 22, 23, 24, 25, 26])
    assert suffixes.propose(sequence_of(PROMPT), 16) == [20, 21, 22, 23, 24], "as many as match"
    assert suffixes.propose(sequence_of(PROMPT, [20]), 3) == [21, 22, 23]
    assert suffixes.propose(sequence_of([9, 9], [22, 23, 24]), 16) == [25, 26]
    assert suffixes.propose(sequence_of([9, 9], [22, 24]), 16) == []


@pytest.mark.parametrize("salts", [("", "a"), ("a", ""), ("a", "b"), ("a", "a\nb")])
def test_what_one_salt_said_never_drafts_for_another(salts: tuple[str, str]) -> None:
    suffixes = learnt([20, 21, 22, 23], salt=salts[0])
    assert suffixes.propose(sequence_of(PROMPT, salt=salts[0]), 4) == [20, 21, 22, 23]
    assert suffixes.propose(sequence_of(PROMPT, salt=salts[1]), 4) == []


def test_no_draft_goes_from_one_answer_into_the_next() -> None:
    suffixes = learnt([20, 21, 22, 23, 24], [30, 31, 32], prompt=[1])
    assert suffixes.propose(sequence_of([9], [21, 22, 23]), 9) == [24]
    assert suffixes.propose(sequence_of([9], [22, 23, 24]), 9) == []
    assert suffixes.propose(sequence_of([9], [24, 1, 30]), 9) == [], "no match begins in the answer before"


def test_the_longer_of_two_matches_is_followed() -> None:
    suffixes = learnt([7, 20, 21, 22, 50])
    assert suffixes.propose(sequence_of([8, 20, 21, 22, 60, 9, 20, 21], [22]), 1) == [60], "equal: in itself"
    assert suffixes.propose(sequence_of([8, 20, 21, 22, 60, 7, 20, 21], [22]), 1) == [50]
    assert suffixes.propose(sequence_of([7, 20, 21, 22, 60, 7, 20, 21], [22]), 1) == [60]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8),  # as many as match
        ({"max_spec_factor": 0.5}, 4),
        ({"max_spec_factor": 2.0}, 16),  # 8 and 16 are 24
        ({"max_spec_factor": 3.0}, 18),  # as after a match of 6
        ({"max_spec_factor": 0.0}, 0),
        ({"max_tree_depth": 12}, 6),
        ({"max_tree_depth": 2}, 0),  # no match is that short
    ],
)
def test_the_draft_is_in_proportion_to_the_match(options: dict[str, Any], expected: int) -> None:
    prompt, answer = list(range(30, 38)), list(range(100, 140))
    suffixes = learnt(answer, prompt=prompt, **options)
    draft = suffixes.propose(sequence_of(prompt), 99)
    assert draft == answer[:expected]


def test_a_draft_ends_before_a_token_that_is_not_likely_enough() -> None:
    answers = [[20, 21, 22, 40, 41], [20, 21, 22, 50, 51], [20, 21, 22, 50, 52], [20, 29, 28, 27, 26]]
    for share, expected in ((0.1, [20, 21, 22, 50, 52]), (0.5, [20, 21, 22, 50]), (0.7, [20, 21, 22]), (0.8, [20])):
        suffixes = learnt(*answers, min_token_prob=share)
        assert suffixes.propose(sequence_of(PROMPT), 9) == expected, share


def test_without_cached_requests_only_the_sequence_itself_is_read() -> None:
    suffixes = learnt([20, 21, 22, 23], max_cached_requests=0)
    assert len(suffixes.answers) == 0
    assert suffixes.propose(sequence_of(PROMPT), 4) == []
    assert suffixes.propose(sequence_of([*PROMPT, 9, 3, 1], [4]), 4) == [1, 5, 9]


def test_all_answers_of_a_request_are_kept_and_no_beams() -> None:
    suffixes, first = proposer(), sequence_of(PROMPT, max_tokens=9, n=1)
    first.token_ids += [20, 21, 22]
    first.group.sequences.append(first.fork(1, 0))
    first.group.sequences[1].token_ids[-3:] = [30, 31, 32]
    suffixes.learn(first.group)
    assert len(suffixes.answers) == 2
    beams = sequence_of(PROMPT, max_tokens=9, beam_width=1)
    beams.token_ids += [40, 41, 42]
    suffixes.learn(beams.group)
    suffixes.learn(sequence_of(PROMPT).group)  # rejected, or aborted before its first token
    assert len(suffixes.answers) == 2


def test_the_oldest_answers_are_forgotten_of_whatever_salt() -> None:
    answers = EarlierAnswers(3)
    for salt, first in (("a", 10), ("b", 20), ("a", 30), ("c", 40)):
        answers.add(salt, list(range(first, first + 5)))
    found = [
        index is not None and index.longest_match([first, first + 1, first + 2], 24) is not None
        for salt, first in (("a", 10), ("b", 20), ("a", 30), ("c", 40))
        for index in [answers.index(salt)]
    ]
    assert found == [False, True, True, True]
    answers.add("c", [1, 2, 3, 4])
    assert (answers.index("b"), len(answers)) == (None, 3), "an index without answers is freed"


def test_tokens_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_answers, "MAX_TOKENS", 100)
    monkeypatch.setattr(earlier_answers, "MAX_ANSWER_TOKENS", 29)
    answers = EarlierAnswers(1000)
    for number in range(9):
        answers.add(str(number % 2), list(range(100 * number, 100 * number + 40)))
    assert len(answers) == 3, "30 tokens each, the separator included"
    sizes = {salt: len(index.text) - index._first for salt, index in answers._indices.items()}
    assert sizes == {"0": 60, "1": 30}
    (index,) = [answers.index("0")]
    assert index is not None
    assert index.longest_match([826, 827, 828], 24) is not None, "the first tokens of a long answer are kept"
    assert index.longest_match([827, 828, 829], 24) is None


def test_an_index_is_freed_with_its_sequence() -> None:
    suffixes, sequence = proposer(), sequence_of([1, 2, 3, 1, 2, 3])
    assert suffixes.propose(sequence, 2) == [1, 2]
    index = weakref.ref(sequence)
    del sequence
    gc.collect()
    assert index() is None
    assert len(suffixes._indices) == 0


# --- in an engine -----------------------------------------------------------------------------------------------------


def ask(engine: Engine, name: str, salt: str = "", prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """Return the answer and the number of steps that it took."""
    params = SamplingParams(temperature=0, max_tokens=24)
    engine.add_request(EngineRequest(name, prompt, params, cache_salt=salt))
    outputs = steps(engine)
    return joined(outputs), len(outputs)


def test_an_engine_answers_the_same_question_in_fewer_steps_under_the_same_salt_only() -> None:
    engine, runner = make_engine(speculative_config={"method": "suffix"}, enable_prefix_caching=False)
    seen: list[SchedulerOutput] = watch(engine)
    expected = runner.answer(PROMPT, 24)
    assert ask(engine, "first") == (expected, 24)
    assert ask(engine, "second") == (expected, 4), "1 token, 6 drafted after a match of 6, 12 drafted, the rest"
    assert {name for output in seen for name in output.proposers.values()} == {"suffix"}
    num_drafts = sum(map(len, (output.drafts for output in seen)))
    answer, num_steps = ask(engine, "third", salt="other")
    assert num_steps == 24
    assert sum(map(len, (output.drafts for output in seen))) == num_drafts, "drafted from what another salt was told"
    assert ask(engine, "fourth", salt="other") == (answer, 4)


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_answers_that_are_not_kept_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = EarlierAnswers.add
    monkeypatch.setattr(EarlierAnswers, "add", lambda self, salt, token_ids: add(self, "", token_ids))
    monkeypatch.setattr(EarlierAnswers, "index", lambda self, salt: self._indices.get(""))
    with pytest.raises(AssertionError):
        test_what_one_salt_said_never_drafts_for_another(("a", "b"))


def test_answers_that_run_into_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_answers, "SEPARATOR", 1)
    with pytest.raises(AssertionError):
        test_no_draft_goes_from_one_answer_into_the_next()


def test_forgotten_answers_that_still_draft_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuffixIndex, "drop", lambda self, count: None)
    with pytest.raises(AssertionError):
        test_the_oldest_answers_are_forgotten_of_whatever_salt()
