"""BlockIO: reads and writes a file past the system's page cache, where the file system and the sizes allow that.

The page cache costs the processor several times what the disk does: a copy of each byte, memory for it, and a kernel
thread that writes it later. On a CPU those take cores from the steps. Memory, offset and size must be multiples of the
disk's block, so pages of other sizes go through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["DISK_BLOCK", "BlockIO"]

DISK_BLOCK: Final = 4096  # of all disks, or a multiple of theirs
_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # Linux has it
_UNSUPPORTED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class BlockIO:
    """One open file. Any thread may call it; two must not use one part of the file at the same time.

    Args:
        path: of the file, which exists.
        descriptor: of the file, through the page cache; stays the caller's.

    Attributes:
        is_direct: whether aligned transfers go past the page cache.

    Raises:
        OSError: if the file cannot be read or written; of all other methods too.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        self._direct: int | None = None
        self._local = threading.local()
        if _DIRECT:
            try:
                self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        self.is_direct = self._direct is not None

    def write(self, head: bytes, page: memoryview, offset: int) -> None:
        """Write a header and the page after it."""
        parts, done = [memoryview(head), page], 0
        if self._fits(head, page, offset):
            aligned = self._aligned(len(head))
            aligned[:] = head
            done = self._try(os.pwritev, [aligned, page], offset)
        while done < len(head) + len(page):  # a write may take less than it was given
            done += os.pwritev(self._descriptor, _after(parts, done), offset + done)

    def read(self, head: bytearray, page: memoryview, offset: int) -> bool:
        """Fill a header and the page after it; False if the file ends before."""
        parts, done = [memoryview(head), page], 0
        if self._fits(head, page, offset):
            aligned = self._aligned(len(head))
            done = self._try(os.preadv, [aligned, page], offset)
            head[:] = aligned
        while done < len(head) + len(page):
            count = os.preadv(self._descriptor, _after(parts, done), offset + done)
            if not count:
                return False
            done += count
        return True

    def close(self) -> None:
        """Close what this has opened."""
        if self._direct is not None:
            os.close(self._direct)

    def _fits(self, head: bytes | bytearray, page: memoryview, offset: int) -> bool:
        return self.is_direct and not any(size % DISK_BLOCK for size in (len(head), len(page), offset))

    def _aligned(self, size: int) -> memoryview:
        """Return aligned memory for a header, which is this thread's until the next call."""
        memory: mmap.mmap | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) != size:
            memory = self._local.memory = mmap.mmap(-1, size)
        return memoryview(memory)

    def _try(self, transfer: Callable[[int, list[memoryview], int], int], parts: list[memoryview], offset: int) -> int:
        """Return the bytes that were transferred past the page cache; 0 if this disk needs larger alignments."""
        assert self._direct is not None
        try:
            return transfer(self._direct, parts, offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.is_direct = False
            return 0


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return what follows the first ``done`` bytes of a header and a page."""
    head, page = parts
    return [head[done:], page] if done < len(head) else [page[done - len(head) :]]
