"""Lease: which of several ingresses runs the batches of a directory.

Leases are numbered files, and each is created once: the holder of the highest number has the lease. It changes a
second file, its beat, every second. An ingress that sees the same beat for TAKEOVER_S seconds of its own clock creates
the next number. So clocks are never compared, and a holder that was only slow learns from the higher number that it has
lost the lease. What it writes before it learns that does no harm: see journal.py.

A lease names the process of its holder. If that has run on this machine and has ended, the lease is free at once.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deployments.batch.disk import Disk, read_json

__all__ = ["BEAT_S", "TAKEOVER_S", "Lease"]

BEAT_S, TAKEOVER_S = 1.0, 15.0
_LEASE = re.compile(r"lease-(\d+)")
_RELEASED = b"released"


class Lease:
    """One ingress's view of the lease. One thread at a time may use it.

    Args:
        disk: writes.
        directory: holds the leases.
        holder: names this ingress, for people who read the files.
        clock: returns monotonic seconds.

    Attributes:
        number: of the lease that this ingress holds; None if it holds none.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        holder: str,
        *,
        takeover_s: float = TAKEOVER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number: int | None = None
        self._disk = disk
        self._directory = directory
        self._holder = holder
        self._takeover_s = takeover_s
        self._clock = clock
        self._num_beats = 0
        self._seen: tuple[int, bytes] | None = None  # the highest lease and its beat ...
        self._seen_at = 0.0  # ... when it changed

    def poll(self) -> bool:
        """Beat if this ingress holds the lease, else take it if no one does; returns whether this ingress holds it.

        Raises:
            OSError: the directory cannot be written.
        """
        self._disk.make_directory(self._directory)
        highest = self._highest()
        if self.number is not None:
            if highest == self.number:
                self._beat(str(self._num_beats).encode())
                return True
            self.number = None
        if self._is_free(highest):
            self._take(highest + 1)
        return self.number is not None

    def release(self) -> None:
        """Let another ingress take the lease at once."""
        if self.number is not None:
            number, self.number = self.number, None
            with suppress(OSError):  # another one waits for TAKEOVER_S then
                self._disk.replace(self._directory / f"beat-{number}", _RELEASED)

    def _highest(self) -> int:
        matches = (_LEASE.fullmatch(path.name) for path in self._directory.iterdir())
        return max((int(match[1]) for match in matches if match is not None), default=0)

    def _is_free(self, number: int) -> bool:
        """Whether the holder of the highest lease has released it, or has not beaten for long enough."""
        if not number:
            return True
        try:
            beat = (self._directory / f"beat-{number}").read_bytes()
        except FileNotFoundError:  # not yet
            beat = b""
        if beat == _RELEASED or self._holder_has_ended(number):
            return True
        if self._seen != (number, beat):
            self._seen, self._seen_at = (number, beat), self._clock()
        return self._clock() - self._seen_at >= self._takeover_s

    def _holder_has_ended(self, number: int) -> bool:
        content = read_json(self._directory / f"lease-{number}") or {}
        return _has_ended(content.get("process"))

    def _take(self, number: int) -> None:
        content = json.dumps({"holder": self._holder, "process": _identity(os.getpid())}).encode()
        if not self._disk.create(self._directory / f"lease-{number}", content):
            return
        self.number = number
        self._beat(b"0")
        for path in list(self._directory.iterdir()):
            kind, _, digits = path.name.partition("-")
            if kind in ("lease", "beat") and digits.isdecimal() and int(digits) < number:
                self._disk.unlink(path)

    def _beat(self, content: bytes) -> None:
        self._num_beats += 1
        self._disk.replace(self._directory / f"beat-{self.number}", content)


def _identity(pid: int) -> dict[str, Any] | None:
    """Return what no other process has, on any machine and at any time; None where the kernel does not say it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")  # of process ids: those of a container are its own
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    started = fields[18]  # clock ticks after the boot: field 22 of proc(5)
    return None if state in "ZX" else {"boot": boot, "namespace": namespace, "pid": pid, "started": started}


def _has_ended(identity: Any) -> bool:
    """Whether a process of this machine has ended; False if it belongs to another one, or if that is not known."""
    own = _identity(os.getpid())
    if own is None or not isinstance(identity, dict):
        return False
    is_near = all(identity.get(name) == own[name] for name in ("boot", "namespace"))
    return is_near and _identity(identity.get("pid", 0)) != identity
