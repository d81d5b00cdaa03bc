"""TensorFiles: reads the bytes of tensors from a checkpoint's safetensors files, and has the system read ahead.

It reads without mapping: a mapped file is read where it is touched, and with a cold page cache each touch waits for a
small piece of the disk. It trusts the files' headers, which safetensors checks when checkpoint.py opens the files.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

__all__ = ["TensorFiles"]

WINDOW = 256 * 2**20  # most bytes read ahead: more might be evicted before they are used
CHUNK = 128 * 2**10  # most bytes of one call: Linux silently ignores the rest


class _Extent(NamedTuple):
    """The bytes of one tensor."""

    file: int  # descriptor
    start: int
    stop: int
    dtype: str  # as safetensors calls it


class TensorFiles:
    """Open safetensors files; leaving the ``with`` closes them."""

    def __init__(self) -> None:
        self._extents: dict[str, _Extent] = {}
        self._files: list[int] = []
        self._expected: deque[str] = deque()  # tensors not yet requested, in reading order
        self._ahead: dict[str, int] = {}  # bytes of tensors that were requested and not yet read

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files:
            os.close(file)

    def open(self, path: Path) -> None:
        """Open a valid safetensors file and read the positions of its tensors."""
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, size, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            self._extents[name] = _Extent(file, 8 + size + start, 8 + size + stop, entry["dtype"])

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype, as safetensors names it."""
        return self._extents[name].dtype

    def read_into(self, memory: memoryview, name: str, offset: int = 0) -> None:
        """Fill ``memory`` with a tensor's bytes from ``offset`` on.

        Raises:
            OSError: if the file has become shorter since it was opened.
        """
        extent = self._extents[name]
        start = extent.start + offset
        assert start + len(memory) <= extent.stop
        while len(memory):
            count = os.preadv(extent.file, [memory], start)
            if count == 0:
                raise OSError(f"the file ends inside '{name}'")
            memory, start = memory[count:], start + count

    # --- reading ahead ------------------------------------------------------------------------------------------

    def expect(self, names: Iterable[str]) -> None:
        """Set the tensors that will be read next, in order."""
        self._expected = deque(names)
        self._ahead = {}

    def reached(self, name: str) -> None:
        """Request the tensors after ``name``, which is read now, as far as the window goes."""
        self._ahead.pop(name, None)
        while self._expected and sum(self._ahead.values()) < WINDOW:
            fetched = self._expected.popleft()
            if fetched != name:
                self._ahead[fetched] = _fetch(self._extents[fetched])


def _fetch(extent: _Extent) -> int:
    """Ask the system to read a tensor ahead, if it can, and return its bytes."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is advice, which some file systems do not take
            for start in range(extent.start, extent.stop, CHUNK):
                os.posix_fadvise(extent.file, start, min(CHUNK, extent.stop - start), os.POSIX_FADV_WILLNEED)
    return extent.stop - extent.start
