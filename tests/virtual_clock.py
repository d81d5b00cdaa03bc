"""An event loop with a clock of its own, for tests of timers: hours pass at once, and load changes nothing."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec
from unittest.mock import patch

from tests.waiting import HANG_S

Params = ParamSpec("Params")


class _Selector(selectors.DefaultSelector):
    """Does not wait for a timer: it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            ready = super().select(HANG_S)
            assert ready, "every task waits, and no timer is set"
            return ready
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0 and jumps to the next timer when nothing is left to do. Not for tests that use threads."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def on_virtual_clock(test: Callable[Params, Coroutine[Any, Any, None]]) -> Callable[Params, None]:
    """Decorator of an async test: run it in a VirtualClockLoop, whose time ``time.monotonic`` returns too.

    The test's fixtures must not be async.
    """

    @functools.wraps(test)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner, patch("time.monotonic", runner.get_loop().time):
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    """Return the running loop's time."""
    return asyncio.get_running_loop().time()
