"""The transfers that the web page draws: those that run, and those of the last minute."""

from __future__ import annotations

import pickle

import pytest

from deployments.transport.pages import transfer_log
from deployments.transport.pages.pull import Pulled
from deployments.transport.pages.transfer_log import Transfer, TransferLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfer_log, "monotonic", lambda: clock.now)
    return clock


def test_a_transfer_is_listed_while_it_runs_and_a_minute_longer(clock: Clock) -> None:
    log, pulled = TransferLog(16, lambda: 7.0), Pulled()
    assert log.recent() == ()
    ended = log.began("tcp://a:1", pulled)
    clock.now += 2
    pulled.num_blocks, pulled.num_bytes = 3, 300
    assert log.recent() == (Transfer("tcp://a:1", 7.0, 2.0, 48, 300, True),)
    pulled.num_blocks, pulled.num_bytes = 4, 400
    clock.now += 1
    ended()
    clock.now += 59
    assert log.recent() == (Transfer("tcp://a:1", 7.0, 3.0, 64, 400, False),)
    assert pickle.loads(pickle.dumps(log.recent())) == log.recent()
    clock.now += 2
    assert log.recent() == ()


def test_what_has_brought_nothing_is_not_listed_once_it_has_ended(clock: Clock) -> None:
    log = TransferLog(16)
    ended = log.began("tcp://a:1", Pulled())
    assert len(log.recent()) == 1
    ended()
    assert log.recent() == ()


def test_the_latest_are_kept(clock: Clock) -> None:
    log = TransferLog(1)
    for number in range(200):
        log.began("tcp://a:1", Pulled(num_blocks=number + 1))()
    assert [transfer.tokens for transfer in log.recent()] == list(range(151, 201))
