"""StepInbox: brings calls of background threads, and deadlines, to the engine's thread.

Whoever drives the engine decides how: AsyncEngine forwards them to its own inbox, which wakes it; the offline LLM runs
them in its steps, and waits here when nothing else is left to do.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

__all__ = ["StepInbox"]

Call = Callable[[], None]


class StepInbox:
    """Calls that wait for the engine's thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._forward: Callable[[Call], None] | None = None
        self._clock = clock
        self._changed = threading.Condition()
        self._deadlines: list[tuple[float, int, Call]] = []  # a heap
        self._order = itertools.count()
        self._timer: threading.Thread | None = None
        self._is_closed = False

    def forward_to(self, post: Callable[[Call], None]) -> None:
        """Pass every call to ``post`` from now on, which any thread may call, and which wakes the engine's thread."""
        self._forward = post
        self.run(post)

    def post(self, call: Call) -> None:
        """Let the engine's thread make a call before its next step. Any thread may call this."""
        if self._forward is not None:
            self._forward(call)
        else:
            self._calls.put(call)

    def post_at(self, deadline: float, call: Call) -> None:
        """Post a call when the clock has reached ``deadline``. It cannot be taken back: the call must ask if it counts.

        A thread waits for deadlines while there are any.
        """
        with self._changed:
            heapq.heappush(self._deadlines, (deadline, next(self._order), call))
            if self._timer is None and not self._is_closed:
                self._timer = threading.Thread(target=self._wait_for_deadlines, name="kv-deadlines", daemon=True)
                self._timer.start()
            self._changed.notify()

    def run(self, run: Callable[[Call], None] | None = None) -> None:
        """Make the calls that wait; do not wait for any."""
        while not self._calls.empty():
            call = self._calls.get()
            call() if run is None else run(call)

    def wait(self, timeout_s: float = 1.0) -> None:
        """Wait for a call and make it, and those after it; return without one after ``timeout_s``."""
        try:
            self._calls.get(timeout=timeout_s)()
        except Empty:
            return
        self.run()

    def close(self) -> None:
        """Forget the deadlines and end their thread."""
        with self._changed:
            self._is_closed = True
            self._deadlines.clear()
            self._changed.notify()
            timer = self._timer
        if timer is not None:
            timer.join()

    def _wait_for_deadlines(self) -> None:
        with self._changed:
            while not self._is_closed:
                if not self._deadlines:  # the thread would keep an engine alive that is no longer used
                    self._timer = None
                    return
                if (left := self._deadlines[0][0] - self._clock()) > 0:
                    self._changed.wait(left)
                else:
                    self.post(heapq.heappop(self._deadlines)[2])
