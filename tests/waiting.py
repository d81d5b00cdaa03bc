"""Waiting for something to become true: the tests' only way to wait, with a bound that only a hang meets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

HANG_S = 120.0
PAUSE_S = 0.05

Value = TypeVar("Value")


def until(
    condition: Callable[[], Value],
    what: str,
    *,
    pause_s: float = PAUSE_S,
    hang_s: float = HANG_S,
    details: Callable[[], object] = lambda: "",
) -> Value:
    """Call ``condition`` until its result is true, and return the result.

    Args:
        condition: is called again after each pause.
        what: describes the condition in the message of a failure.
        pause_s: seconds between two calls.
        hang_s: fail after this many seconds; far more than the slowest machine needs.
        details: is called for the message of a failure.
    """
    deadline = time.monotonic() + hang_s
    while not (value := condition()):
        assert time.monotonic() < deadline, _failure(what, hang_s, value, details)
        time.sleep(pause_s)
    return value


async def until_async(
    condition: Callable[[], Value],
    what: str,
    *,
    pause_s: float = PAUSE_S,
    hang_s: float = HANG_S,
    details: Callable[[], object] = lambda: "",
) -> Value:
    """Do the same in an event loop: ``condition`` runs in a thread, so it may block."""
    deadline = time.monotonic() + hang_s
    while not (value := await asyncio.to_thread(condition)):
        assert time.monotonic() < deadline, _failure(what, hang_s, value, details)
        await asyncio.sleep(pause_s)
    return value


async def until_in_loop(
    condition: Callable[[], Value],
    what: str = "the condition",
    *,
    pause_s: float = 0.002,
    hang_s: float = HANG_S,
    details: Callable[[], object] = lambda: "",
) -> Value:
    """Do the same where ``condition`` looks at what the event loop owns: it runs in the loop, and must not block."""
    deadline = time.monotonic() + hang_s
    while not (value := condition()):
        assert time.monotonic() < deadline, _failure(what, hang_s, value, details)
        await asyncio.sleep(pause_s)
    return value


def _failure(what: str, hang_s: float, value: object, details: Callable[[], object]) -> str:
    return f"{what}: not after {hang_s:g} s; last result: {value!r}; {details()}"
