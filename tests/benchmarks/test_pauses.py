"""Pauses of a core: what they take of a span of time, and that a process that cannot run is one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from benchmarks.serving import pauses as module
from benchmarks.serving.pauses import SLEEP_S, Pauses, pauses_of, watching_pauses
from tests.waiting import until


def test_pauses_of_two_cores_count_once() -> None:
    pauses = Pauses([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)])
    assert pauses.seconds == pytest.approx(4.0)
    assert pauses.within(0.0, 10.0) == pytest.approx(4.0)
    assert pauses.within(2.5, 5.5) == pytest.approx(2.0)
    assert pauses.within(4.0, 5.0) == 0.0
    assert Pauses().seconds == 0.0


def test_a_process_that_wakes_up_late_has_paused() -> None:
    now, late = 0.0, [0.0, 0.049, 0.5, 0.0, 0.06]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + late.pop(0)

    spans = list(itertools.islice(pauses_of(lambda: now, sleep), 2))
    assert [stop - start for start, stop in spans] == pytest.approx([0.5, 0.06])
    assert spans[0][0] == pytest.approx(2 * SLEEP_S + 0.049 + SLEEP_S)
    assert not late


def test_what_the_watchers_of_all_cores_print_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watcher = tmp_path / "watcher.py"
    watcher.write_text(
        "import pathlib, signal, sys\n"
        "print('1.0 2.0\\n3.5 4.0\\n5.0', end='', flush=True)\n"  # the last line is cut off
        f"pathlib.Path({str(tmp_path)!r}, f'core{{sys.argv[1:]}}').touch()\n"
        "signal.pause()\n"
    )
    monkeypatch.setattr(module, "__file__", str(watcher))
    num_cores = len(os.sched_getaffinity(0))
    with watching_pauses() as pauses:
        until(lambda: len([*tmp_path.glob("core*")]) == num_cores, "all watchers have printed")
    assert sorted(pauses.spans) == [(1.0, 2.0)] * num_cores + [(3.5, 4.0)] * num_cores
