"""Payoff and Acceptance: drafts as long as they are expected to pay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.request import EngineRequest
from engine.scheduling.drafting.acceptance import Acceptance
from engine.scheduling.drafting.payoff import Payoff
from engine.sequence import Sequence, SequenceGroup


def measured(seconds: Callable[[int], float], free_tokens: int | None = 8, most: int = 256) -> Payoff:
    """Return what has measured steps of every size up to ``most``."""
    payoff = Payoff(free_tokens)
    for num_tokens in range(most, 0, -1):
        payoff.record_step(num_tokens, seconds(num_tokens))
    return payoff


def cpu(num_tokens: int) -> float:
    """Seconds of a step that reads its weights in the time in which it computes six tokens."""
    return max(6, num_tokens) / 100


def best_length(payoff: Payoff, rate: float, num_sequences: int = 1, limit: int = 16) -> int:
    return payoff.draft_tokens(rate, limit, num_sequences, num_sequences)[0]


def test_tokens_that_cost_nothing_are_drafted_however_unlikely() -> None:
    payoff = measured(cpu)
    assert best_length(payoff, 0.3) == 3  # the fourth is right once in a hundred times
    assert best_length(payoff, 0.5) == 5
    assert best_length(payoff, 0.9, limit=2) == 2


def test_tokens_that_cost_time_are_drafted_if_they_are_likely_enough() -> None:
    assert best_length(measured(cpu), 0.99) == 5  # each further one costs as much as one in six, and gives less
    cheaper = measured(lambda num_tokens: 0.06 + max(0, num_tokens - 6) / 400)
    assert best_length(cheaper, 0.95) > 8
    assert best_length(cheaper, 0.6) == 5


def test_a_full_batch_drafts_nothing() -> None:
    payoff = measured(cpu)
    for num_sequences in (8, 15, 16, 17, 50, 64, 200, 256, 1000):
        for rate in (0.1, 0.5, 0.9, 0.99):
            assert best_length(payoff, rate, num_sequences) == 0


def test_a_gpu_drafts_for_full_batches_too() -> None:
    payoff = measured(lambda num_tokens: 0.01 + num_tokens * 1e-6, None)
    assert best_length(payoff, 0.9, 16) == 16


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 3, 5, 7])
def test_the_expected_speed_is_never_below_that_without_drafts(rate: float, num_sequences: int) -> None:
    payoff = measured(cpu)
    length, gained = payoff.draft_tokens(rate, 16, num_sequences, num_sequences)
    assert gained == pytest.approx(sum(rate**count for count in range(1, length + 1)))
    expected = (num_sequences + gained) / cpu(num_sequences + length)
    assert expected >= num_sequences / cpu(num_sequences)


def test_a_step_without_drafts_is_measured_first_and_after_many_others() -> None:
    payoff = Payoff(8)
    assert best_length(payoff, 0.9) == 0
    payoff.record_step(1, 0.06)
    assert best_length(payoff, 0.9) > 0
    for _ in range(100):
        payoff.record_step(5, 0.06)
    assert best_length(payoff, 0.9) > 0
    payoff.record_step(5, 0.06)
    assert best_length(payoff, 0.9) == 0


def test_sizes_that_were_never_measured_cost_what_free_tokens_say() -> None:
    payoff = Payoff(8)
    payoff.record_step(1, 0.1)
    assert payoff.cost(8) == pytest.approx(0.1)
    assert payoff.cost(16) == pytest.approx(0.2)
    payoff.record_step(4, 0.3)  # more than was expected
    assert payoff.cost(4) == payoff.cost(8) == pytest.approx(0.3)
    assert payoff.cost(2) == pytest.approx(0.1)
    assert payoff.cost(512) == 2 * payoff.cost(256)


def test_the_first_draft_token_of_a_step_costs_what_it_was_measured_to_cost() -> None:
    """Not a third of that, as between the sizes 40 and 48."""
    payoff = Payoff(1)
    payoff.record_step(40, 3.3)
    payoff.record_step(43, 4.0)
    assert payoff.cost(43) == pytest.approx(4.0)
    assert payoff.cost(41) == pytest.approx(4.0 * 41 / 43)
    assert payoff.draft_tokens(0.7, 3, 40, 40) == (0, 0.0)


def test_what_a_size_took_long_ago_is_forgotten() -> None:
    """A pause while the only step with drafts was measured ends drafts for a while, and not for good."""
    payoff = Payoff(8)
    payoff.record_step(1, 0.1)
    payoff.record_step(2, 9.0)
    assert best_length(payoff, 0.9, limit=2) == 0
    for _ in range(1998):
        payoff.record_step(1, 0.1)
    assert best_length(payoff, 0.9, limit=2) == 0
    for _ in range(3):
        payoff.record_step(1, 0.1)
    assert best_length(payoff, 0.9, limit=2) == 2


def test_drafts_that_do_not_pay_are_tried_where_that_costs_little() -> None:
    payoff = measured(cpu)
    assert [num_sequences for num_sequences in range(1, 65) if payoff.may_try(num_sequences, num_sequences)] == [
        *range(1, 6)
    ]
    assert not Payoff(8).may_try(1, 1)  # a step without drafts is measured first


def test_a_larger_step_never_costs_less() -> None:
    payoff = measured(lambda num_tokens: 0.1 if num_tokens % 2 else 0.05)
    costs = [payoff.cost(num_tokens) for num_tokens in range(1, 600)]
    assert costs == sorted(costs)


def test_a_pause_of_the_machine_is_forgotten() -> None:
    payoff = Payoff(8)
    for seconds in (0.1, 60.0):
        payoff.record_step(1, seconds)
    assert payoff.cost(1) == pytest.approx(0.106)
    for _ in range(20):
        payoff.record_step(1, 0.1)
    assert payoff.cost(1) == pytest.approx(0.1, rel=0.01)


def a_sequence(num_tokens: int = 1) -> Sequence:
    return SequenceGroup(
        EngineRequest("a", [1] * num_tokens),
        arrival=0,
        root=0,
        stop_token_ids=frozenset(),
        max_total_tokens=100,
        seed=0,
    ).sequences[0]


def test_the_rate_follows_the_drafts_of_a_sequence() -> None:
    acceptance, right, wrong = Acceptance(), a_sequence(), a_sequence()
    first = acceptance.rate(right)
    acceptance.rate(wrong)
    for _ in range(20):
        acceptance.record_outcome(right, 4, 4)
        acceptance.record_outcome(wrong, 0, 4)
    assert acceptance.rate(wrong) < 0.2 < first < 0.95 < acceptance.rate(right)


def test_tokens_after_the_first_wrong_one_do_not_count() -> None:
    acceptance, short, long = Acceptance(), a_sequence(), a_sequence()
    assert acceptance.rate(short) == acceptance.rate(long)
    acceptance.record_outcome(short, 1, 2)
    acceptance.record_outcome(long, 1, 9)
    assert acceptance.rate(short) == acceptance.rate(long)


def test_a_new_sequence_begins_with_the_mean_of_all() -> None:
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.record_outcome(a_sequence(), 0, 1)
    assert acceptance.rate(a_sequence()) < 0.05


def test_a_sequence_without_drafts_is_tried_again_now_and_then() -> None:
    acceptance, sequence = Acceptance(), a_sequence(17)
    for _ in range(4):
        assert acceptance.may_get_draft(sequence)
        acceptance.record_draft(sequence, has_draft=False)
    waits = []
    for _ in range(64):
        waits.append(acceptance.may_get_draft(sequence))
        sequence.token_ids.append(1)
    assert sum(waits) == 4
    acceptance.record_draft(sequence, has_draft=True)
    assert acceptance.may_get_draft(sequence)
