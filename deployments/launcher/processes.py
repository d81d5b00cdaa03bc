"""The processes of a running server: finds all descendants of this process and ends them.

Ray's processes may outlive the process that started them; as a subreaper this process remains their ancestor.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time

import psutil

__all__ = ["adopt_orphans", "argument_of", "descendants", "end", "is_alive", "replica_processes"]

REPLICA_TITLES = ("ray::SERVE_REPLICA:", "ray::ServeReplica:")  # while it starts, and afterwards

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (PR_SET_CHILD_SUBREAPER, on Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Return all running descendants of this process."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def replica_processes() -> list[psutil.Process]:
    """Return the descendants that are replicas of Serve."""
    return [process for process in descendants() if _title(process).startswith(REPLICA_TITLES)]


def argument_of(processes: list[psutil.Process], prefix: str) -> str:
    """Return the rest of the first command-line argument that starts with ``prefix``; empty if there is none."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for argument in process.cmdline():
                if argument.startswith(prefix):
                    return str(argument.removeprefix(prefix))
    return ""


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """Terminate ``processes``, and kill those that still run after ``grace_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + grace_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in filter(is_alive, processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str((process.cmdline() or [""])[0])
    return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
