"""Numbered messages over a line that loses, repeats and reorders them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from deployments.transport.request_channel.numbering import MAX_STALLED_REPORTS, Arrivals, Outbox


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_everything_arrives_once_and_in_order(seed: int, count: int) -> None:
    rng = random.Random(seed)
    outbox, arrivals = Outbox(), Arrivals()
    line: list[tuple[int, bytes]] = []
    got: list[bytes] = []
    sent = [bytes([number % 256]) * (number % 5) for number in range(count)]

    def receive() -> None:
        while line:
            number, data = line.pop(0)
            if rng.random() < 0.3:  # lost
                continue
            if arrivals.accept(number):
                got.append(data)
            if rng.random() < 0.2:  # a resend that was already on the way
                line.append((number, data))

    for data in sent:
        outbox.add(data)
        line.append((outbox.last_number, data))
        if rng.random() < 0.3:
            receive()
        if rng.random() < 0.3:
            outbox.acknowledge(arrivals.received)
        if rng.random() < 0.3 and arrivals.has_gap:
            line += outbox.after(arrivals.received)
    while len(got) < count:
        line += outbox.after(arrivals.received)
        receive()
    assert got == sent
    assert not arrivals.has_gap
    outbox.acknowledge(arrivals.received)
    assert (len(outbox), outbox.num_bytes, outbox.acknowledged) == (0, 0, count)


def test_an_acknowledgement_from_the_past_or_the_future_changes_nothing() -> None:
    outbox = Outbox()
    for _ in range(3):
        outbox.add(b"x")
    outbox.acknowledge(2)
    for number in (1, 2, 4, 99):
        outbox.acknowledge(number)
        assert (len(outbox), outbox.acknowledged) == (1, 2)
    assert list(outbox.after(0)) == list(outbox.after(2)) == [(3, b"x")]
    assert list(outbox.after(3)) == []


def test_a_lost_tail_is_noticed_when_reports_repeat_what_has_not_arrived() -> None:
    arrivals = Arrivals()
    reports = [arrivals.has_lost_tail(2) for _ in range(2 * MAX_STALLED_REPORTS)]
    assert reports == ([False] * (MAX_STALLED_REPORTS - 1) + [True]) * 2
    for _ in range(MAX_STALLED_REPORTS - 1):
        assert not arrivals.has_lost_tail(2)
    arrivals.accept(1)  # they arrive after all
    assert not any(arrivals.has_lost_tail(2) for _ in range(MAX_STALLED_REPORTS))
    arrivals.accept(2)
    assert not any(arrivals.has_lost_tail(2) for _ in range(2 * MAX_STALLED_REPORTS)), "nothing is missing"
