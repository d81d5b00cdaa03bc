"""FaultyDisk: a disk on which one operation fails, or all from one on, as when the process is killed.

InterruptedDisk: a disk that does something else before one of its operations, as when another process is faster.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from deployments.batch.disk import Disk


class DiskError(OSError):
    """The failure of a FaultyDisk."""


class FaultyDisk(Disk):
    """Fails at the operation with the number ``fails_at``.

    Args:
        fails_at: counted from 0; None never.
        is_dead: whether all later operations fail, too: the process was killed.
        is_done: whether the operation takes effect before it fails.
    """

    def __init__(self, fails_at: int | None = None, *, is_dead: bool = False, is_done: bool = False) -> None:
        self.num_operations = 0
        self._fails_at = fails_at
        self._is_dead = is_dead
        self._is_done = is_done

    def _fails(self) -> bool:
        number, self.num_operations = self.num_operations, self.num_operations + 1
        if self._fails_at is None or number < self._fails_at:
            return False
        if number > self._fails_at and not self._is_dead:
            return False
        self._is_done &= number == self._fails_at
        return True

    def _fail(self) -> None:
        raise DiskError(errno.ENOSPC, "no space left")

    def write(self, descriptor: int, data: bytes) -> None:
        if not self._fails():
            super().write(descriptor, data)
            return
        if self._is_done:
            super().write(descriptor, data[: max(1, len(data) * 2 // 3)])
        self._fail()

    def sync(self, descriptor: int) -> None:
        if self._fails():  # a test does not lose its power
            self._fail()

    def link(self, source: Path, target: Path) -> None:
        self._once("link", source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._once("rename", source, target)

    def unlink(self, path: Path) -> None:
        self._once("unlink", path)

    def make_directory(self, path: Path) -> None:
        self._once("make_directory", path)

    def _once(self, name: str, *paths: Path) -> None:
        fails = self._fails()
        if not fails or self._is_done:
            getattr(super(), name)(*paths)
        if fails:
            self._fail()


class InterruptedDisk(FaultyDisk):
    """Calls a function before the operation with the number ``number``, in the thread of the operation.

    Args:
        number: counted from 0.
        interrupt: is called once.
    """

    def __init__(self, number: int, interrupt: Callable[[], object]) -> None:
        super().__init__()
        self._number = number
        self._interrupt = interrupt

    def _fails(self) -> bool:
        if self.num_operations == self._number:
            self._number = -1  # the function may call this disk
            self._interrupt()
        return super()._fails()
