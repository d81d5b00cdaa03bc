"""PredictionProposer: where an answer is in its predicted text."""

from __future__ import annotations

from engine.request import EngineRequest
from engine.scheduling.drafting.prediction_proposer import PredictionProposer
from engine.sequence import Sequence, SequenceGroup

TEXT = [11, 12, 13, 14, 15, 12, 13, 16, 17, 18]


def sequence_of(*output: int, text: list[int] = TEXT) -> Sequence:
    request = EngineRequest("a", [11, 12, 1], prediction_token_ids=text)
    group = SequenceGroup(request, arrival=0, root=0, stop_token_ids=frozenset(), max_total_tokens=100, seed=0)
    sequence = group.sequences[0]
    sequence.token_ids += output
    return sequence


def test_an_answer_begins_with_the_beginning_of_the_text() -> None:
    assert PredictionProposer().propose(sequence_of(), 4) == TEXT[:4]
    assert PredictionProposer().propose(sequence_of(), 100) == TEXT


def test_the_text_is_followed_while_the_answer_agrees() -> None:
    proposer, sequence = PredictionProposer(), sequence_of()
    for number in range(len(TEXT)):
        assert proposer.propose(sequence, 3) == TEXT[number : number + 3]
        sequence.token_ids.append(TEXT[number])
    assert proposer.propose(sequence, 3) == []
    sequence.token_ids.append(5)
    assert proposer.propose(sequence, 3) == []


def test_after_a_difference_the_last_two_tokens_are_looked_for_ahead_first() -> None:
    proposer, sequence = PredictionProposer(), sequence_of(11, 12, 13, 14)
    assert proposer.propose(sequence, 2) == [15, 12]
    sequence.token_ids += [99]
    assert proposer.propose(sequence, 2) == []
    sequence.token_ids += [12]
    assert proposer.propose(sequence, 2) == []
    sequence.token_ids += [13]  # the second occurrence, which is ahead
    assert proposer.propose(sequence, 2) == [16, 17]
    sequence.token_ids += [16, 11, 12]  # it is behind only
    assert proposer.propose(sequence, 2) == [13, 14]


def test_one_token_in_common_is_no_place_in_the_text() -> None:
    assert PredictionProposer().propose(sequence_of(12), 4) == []
    assert PredictionProposer().propose(sequence_of(99, 12), 4) == []
    assert PredictionProposer().propose(sequence_of(11, 13), 4) == []


def test_the_prompt_is_not_part_of_the_answer() -> None:
    """The prompt's last tokens are in the text; the answer has not begun there."""
    assert PredictionProposer().propose(sequence_of(), 2) == [11, 12]
    assert PredictionProposer().propose(sequence_of(7), 2) == []


def test_an_answer_that_another_replica_began_is_followed() -> None:
    assert PredictionProposer().propose(sequence_of(*TEXT[:5]), 2) == TEXT[5:7]


def test_each_answer_of_a_request_has_its_own_place() -> None:
    proposer, first = PredictionProposer(), sequence_of()
    second = first.fork(1, seed=1)
    first.token_ids += TEXT[:3]
    second.token_ids += TEXT[:6]
    assert proposer.propose(first, 1) == [14]
    assert proposer.propose(second, 1) == [13]


def test_a_request_without_a_prediction_gets_nothing() -> None:
    assert PredictionProposer().propose(sequence_of(text=[]), 4) == []


def test_only_a_part_of_a_long_text_is_searched() -> None:
    text = [*range(100, 6000), 7, 8, 9]
    assert PredictionProposer().propose(sequence_of(7, 8, text=text), 1) == []
    assert PredictionProposer().propose(sequence_of(*text[:3000], 7, 8, text=text), 1) == [9]
