"""The first stop signal raises StopRequested; a second one, unless it follows at once, sets the event."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from deployments.launcher import stop_signals
from deployments.launcher.stop_signals import SAME_SIGNAL_S, STOP_SIGNALS, StopRequested, install_stop_handlers
from tests.engine.observability.clock import Clock


@pytest.fixture(autouse=True)
def _restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stop_signals, "monotonic", clock)
    return clock


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_means_stop_at_once(number: signal.Signals, clock: Clock) -> None:
    stop_at_once = install_stop_handlers()
    with pytest.raises(StopRequested):
        signal.raise_signal(number)
    assert not stop_at_once.is_set()
    clock.now += SAME_SIGNAL_S + 0.01
    signal.raise_signal(signal.SIGTERM)
    assert stop_at_once.is_set()


def test_the_same_signal_twice_counts_once(clock: Clock) -> None:
    stop_at_once = install_stop_handlers()
    with pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGINT)
    clock.now += SAME_SIGNAL_S - 0.01
    signal.raise_signal(signal.SIGINT)
    assert not stop_at_once.is_set()
