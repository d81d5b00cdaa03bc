"""The first stop signal raises StopRequested; a second one, unless it follows at once, sets the event."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from deployments.launcher import stop_signals
from deployments.launcher.stop_signals import STOP_SIGNALS, StopRequested, install_stop_handlers


@pytest.fixture(autouse=True)
def _restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_means_stop_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "SAME_SIGNAL_S", 0.05)
    stop_at_once = install_stop_handlers()
    with pytest.raises(StopRequested):
        signal.raise_signal(number)
    assert not stop_at_once.is_set()
    time.sleep(0.1)
    signal.raise_signal(signal.SIGTERM)
    assert stop_at_once.is_set()


def test_the_same_signal_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "SAME_SIGNAL_S", 60.0)
    stop_at_once = install_stop_handlers()
    with pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert not stop_at_once.is_set()
