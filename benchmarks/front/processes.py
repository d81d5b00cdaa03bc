"""CPU seconds of a server's processes, by what they are: ingresses, engines, HAProxy, and the rest of Ray."""

from __future__ import annotations

from contextlib import suppress

import psutil

__all__ = ["KINDS", "CpuTimes", "kind_of"]

INGRESS, ENGINE, HAPROXY, OTHERS = KINDS = ("ingress", "engine", "haproxy", "others")


def kind_of(command: str) -> str:
    """Return what a process is, from its command line; replicas name their deployment there.

    >>> kind_of("ray::ServeReplica:pagoda:ingress")
    'ingress'
    """
    if command.startswith("ray::ServeReplica:"):
        return INGRESS if ":ingress" in command else ENGINE
    return HAPROXY if "haproxy" in command.split(" ", 1)[0] else OTHERS


class CpuTimes:
    """Measures the processes that descend from one: those that exist when this object is made.

    Args:
        root: process id of the launcher.
    """

    def __init__(self, root: int) -> None:
        launcher = psutil.Process(root)
        self._processes = [(item, kind_of(_command(item))) for item in [launcher, *launcher.children(recursive=True)]]

    def pids(self, kind: str) -> list[int]:
        """Return the process ids of one kind."""
        return [process.pid for process, of in self._processes if of == kind]

    def read(self) -> dict[str, float]:
        """Return the user and system seconds that each kind has used so far."""
        seconds = dict.fromkeys(KINDS, 0.0)
        for process, kind in self._processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                seconds[kind] += times.user + times.system
        return seconds


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
