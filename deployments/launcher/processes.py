"""The processes below a running server: finding all of them and ending them, whoever their parent has become.

It knows nothing of Ray beyond that its processes may outlive the one that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time

import psutil

__all__ = ["adopt_orphans", "argument_of", "descendants", "end"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, where the system can do that (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Return every process below this one."""
    return [process for process in psutil.Process().children(recursive=True) if _alive(process)]


def argument_of(processes: list[psutil.Process], prefix: str) -> str:
    """Return what follows ``prefix`` in the first argument of any process that begins so; empty if none does."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for argument in process.cmdline():
                if argument.startswith(prefix):
                    return str(argument.removeprefix(prefix))
    return ""


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """Ask ``processes`` to end, and kill those that still run after ``grace_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + grace_s
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in filter(_alive, processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
