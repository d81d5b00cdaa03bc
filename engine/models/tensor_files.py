"""TensorFiles: the bytes of a checkpoint's tensors, in whichever safetensors file they lie.

It fills memory from the files without mapping them, and has the kernel fetch what will be read next: mapped files are
read where they are touched, and with a cold page cache each touch would wait for a small piece of the disk. It trusts
the files' headers, which somebody else has checked.
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

WINDOW = 256 * 2**20  # bytes that are fetched before they are needed, at most: more might be evicted unread
CHUNK = 128 * 2**10  # bytes fetched by one call, at most, by default: Linux silently cuts off what is beyond


class _Place(NamedTuple):
    """Where a tensor lies."""

    file: int  # descriptor
    start: int
    stop: int
    dtype: str  # as safetensors calls it


class TensorFiles:
    """Open safetensors files, to be closed by leaving the ``with``."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []
        self._expected: deque[str] = deque()  # not yet fetched, in the order of reading
        self._ahead: dict[str, int] = {}  # bytes of those that are fetched and not yet read

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files:
            os.close(file)

    def open(self, path: Path) -> None:
        """Learn where the tensors of a valid safetensors file lie."""
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, size, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            self._places[name] = _Place(file, 8 + size + start, 8 + size + stop, entry["dtype"])

    def dtype(self, name: str) -> str:
        """Return the name that safetensors has for a tensor's dtype."""
        return self._places[name].dtype

    def read_into(self, memory: memoryview, name: str, offset: int = 0) -> None:
        """Fill ``memory``, of bytes, with a tensor's from ``offset`` on.

        Raises:
            OSError: if the file has become shorter.
        """
        place = self._places[name]
        start = place.start + offset
        assert start + len(memory) <= place.stop
        while len(memory):
            count = os.preadv(place.file, [memory], start)
            if count == 0:
                raise OSError(f"the file ends inside '{name}'")
            memory, start = memory[count:], start + count

    # --- reading ahead ------------------------------------------------------------------------------------------

    def expect(self, names: Iterable[str]) -> None:
        """Announce what will be read next and in which order."""
        self._expected = deque(names)
        self._ahead = {}

    def reached(self, name: str) -> None:
        """Fetch what lies in the window behind ``name``, which is read now."""
        self._ahead.pop(name, None)
        while self._expected and sum(self._ahead.values()) < WINDOW:
            fetched = self._expected.popleft()
            if fetched != name:
                self._ahead[fetched] = _fetch(self._places[fetched])


def _fetch(place: _Place) -> int:
    """Have a tensor fetched, where the system can do that, and return its size."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is advice, which some file systems do not take
            for start in range(place.start, place.stop, CHUNK):
                os.posix_fadvise(place.file, start, min(CHUNK, place.stop - start), os.POSIX_FADV_WILLNEED)
    return place.stop - place.start
