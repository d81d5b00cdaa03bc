"""Stop signals: the first one raises StopRequested in the main thread, a second one sets an event."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType

__all__ = ["StopRequested", "install_stop_handlers"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_S = 0.5  # a signal to the process group arrives twice: from the terminal and through make


class StopRequested(Exception):  # noqa: N818
    """A stop signal has arrived."""


def install_stop_handlers() -> threading.Event:
    """Handle stop signals from now on; return the event that a second one sets: "stop at once"."""
    stop_at_once = threading.Event()

    def on_first(number: int, frame: FrameType | None) -> None:
        first_at = monotonic()

        def on_second(number: int, frame: FrameType | None) -> None:
            if monotonic() - first_at > SAME_SIGNAL_S:
                stop_at_once.set()

        _set_handler(on_second)
        raise StopRequested

    _set_handler(on_first)
    return stop_at_once


def _set_handler(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
