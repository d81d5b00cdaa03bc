"""StepDelays: how late the steps of an engine start because its thread could not run.

    wait (as for a GPU) | the host's part of the step: update, publish, schedule | wait ...
                        |<--------------------- gap ----------------------------->|

A delay is a gap without the CPU time of the thread in it: the thread wanted to run and did not. Linux gives the part of
it in which another thread or process had the processor; what remains is the wait for the interpreter's lock, which the
event loop of the same process holds, and for memory pages and the like.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic, thread_time

__all__ = ["StepDelays"]

SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds waiting for one, ...


class StepDelays:
    """The delays of one engine. Only its step thread calls the methods.

    Args:
        path: the file to which ``write`` appends a line for each step: delay and its part without a processor, in
            microseconds. Without a path nothing is recorded.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._lines: list[str] = []
        self._wait_ends: float | None = None
        self._cpu_s = self._queued_s = 0.0

    def start_wait(self, seconds: float) -> None:
        """Record the gap since the end of the last wait; start a new wait that ends after ``seconds``."""
        if self._path is None:
            return
        now, cpu_s, queued_s = monotonic(), thread_time(), _queued_s()
        if self._wait_ends is not None:
            delay_s = now - self._wait_ends - (cpu_s - self._cpu_s)
            self._lines.append(f"{1e6 * delay_s:.1f} {1e6 * (queued_s - self._queued_s):.1f}\n")
        self._wait_ends, self._cpu_s, self._queued_s = now + seconds, cpu_s, queued_s

    def go_idle(self) -> None:
        """Do not record the gap until the next step: there is nothing to compute."""
        self._wait_ends = None

    def write(self) -> None:
        """Append what was recorded to the file."""
        if self._path is not None and self._lines:
            with Path(self._path).open("a", encoding="utf-8") as file:
                file.writelines(self._lines)
            self._lines.clear()


def _queued_s() -> float:
    """Return the seconds that this thread has waited for a processor; 0 where the kernel does not say."""
    with suppress(OSError, IndexError):
        return int(SCHEDSTAT.read_text(encoding="utf-8").split()[1]) / 1e9
    return 0.0
