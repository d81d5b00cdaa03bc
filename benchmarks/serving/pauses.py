"""Pauses of the machine: times in which a core does not run even a process that only sleeps.

A virtual machine stops for a second and more while its host does other work or gives it memory. What was slow because
of that says nothing about a server. A process of this module on each core sleeps again and again and writes down when
it woke up late: a core that is merely busy lets one that has slept go first, within some milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, sleep

__all__ = ["Pauses", "pauses_of", "watching_pauses"]

SLEEP_S = 0.005
LEAST_S = 0.05  # late by less is not a pause


@dataclass
class Pauses:
    """The pauses in a block of watching_pauses, once it has ended.

    Attributes:
        spans: when each began and ended, of perf_counter, which all processes share; those of two cores may overlap.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)

    def within(self, start: float, stop: float) -> float:
        """Return for how many seconds between two times some core paused."""
        total, reached = 0.0, start
        for begin, end in sorted(self.spans):
            begin, end = max(begin, reached), min(end, stop)
            if begin < end:
                total, reached = total + end - begin, end
        return total

    @property
    def seconds(self) -> float:
        """For how many seconds some core paused."""
        return self.within(float("-inf"), float("inf"))


@contextmanager
def watching_pauses() -> Iterator[Pauses]:
    """Watch every core while the block runs."""
    pauses = Pauses()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [None]
    command = [sys.executable, "-S", __file__]
    watchers = [
        subprocess.Popen([*command, *([] if core is None else [str(core)])], stdout=subprocess.PIPE, text=True)
        for core in cores
    ]
    try:
        yield pauses
    finally:
        for watcher in watchers:
            watcher.terminate()
            text, _ = watcher.communicate()
            lines = text.split("\n")[:-1]  # the last one may be cut off
            pauses.spans += [(float(start), float(stop)) for start, stop in map(str.split, lines)]


def pauses_of(clock: Callable[[], float], sleep: Callable[[float], None]) -> Iterator[tuple[float, float]]:
    """Sleep again and again; yield the start and the end of each pause, without end."""
    last = clock()
    while True:
        sleep(SLEEP_S)
        now = clock()
        if now - last > SLEEP_S + LEAST_S:
            yield last + SLEEP_S, now
        last = now


def _watch() -> None:
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    for start, stop in pauses_of(perf_counter, sleep):
        print(start, stop, flush=True)


if __name__ == "__main__":
    _watch()
