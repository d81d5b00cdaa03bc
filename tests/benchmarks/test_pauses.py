"""Pauses of a core: what they take of a span of time, and that a process that cannot run is one."""

from __future__ import annotations

import os
import signal
import subprocess
from time import perf_counter, sleep
from typing import Any

import pytest

from benchmarks.serving import pauses as module
from benchmarks.serving.pauses import Pauses, watching_pauses


def test_pauses_of_two_cores_count_once() -> None:
    pauses = Pauses([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)])
    assert pauses.seconds == pytest.approx(4.0)
    assert pauses.within(0.0, 10.0) == pytest.approx(4.0)
    assert pauses.within(2.5, 5.5) == pytest.approx(2.0)
    assert pauses.within(4.0, 5.0) == 0.0
    assert Pauses().seconds == 0.0


def test_a_watcher_that_is_stopped_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    with watching_pauses() as pauses:
        sleep(1.0)  # until it runs
        stopped = perf_counter()
        os.kill(started[0].pid, signal.SIGSTOP)
        sleep(0.5)
        os.kill(started[0].pid, signal.SIGCONT)
        sleep(0.3)
    assert pauses.within(stopped, stopped + 0.5) == pytest.approx(0.5, abs=0.1)
