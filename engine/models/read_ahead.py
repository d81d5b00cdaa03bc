"""ReadAhead: has the kernel fetch a checkpoint's tensors from the disk before somebody reads them.

Mapped files are read where they are touched, and with a cold page cache each touch would wait for a small piece of the
disk. It knows names and places in safetensors files, whose headers somebody else has checked, and no tensors.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

__all__ = ["ReadAhead"]

WINDOW = 256 * 2**20  # bytes that are fetched before they are needed, at most: more might be evicted unread
CHUNK = 128 * 2**10  # bytes fetched by one call, at most, by default: Linux silently cuts off what is beyond


class _Place(NamedTuple):
    """Where a tensor lies."""

    file: int  # descriptor
    start: int
    stop: int


class ReadAhead:
    """Fetches tensors in an order that is told beforehand, some ``WINDOW`` ahead; does nothing but on Linux."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []
        self._expected: deque[str] = deque()  # not yet fetched, in the order of reading
        self._ahead: dict[str, int] = {}  # bytes of those that are fetched and not yet read

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files:
            os.close(file)

    def open(self, path: Path) -> None:
        """Learn where the tensors of a valid safetensors file lie."""
        if not hasattr(os, "posix_fadvise"):
            return
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, size, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            self._places[name] = _Place(file, 8 + size + start, 8 + size + stop)

    def expect(self, names: Iterable[str]) -> None:
        """Announce what will be read next and in which order."""
        self._expected = deque(name for name in names if name in self._places)
        self._ahead = {}

    def reached(self, name: str) -> None:
        """Fetch what lies in the window behind ``name``, which is read now."""
        self._ahead.pop(name, None)
        while self._expected and sum(self._ahead.values()) < WINDOW:
            fetched = self._expected.popleft()
            if fetched != name:
                self._ahead[fetched] = self._fetch(self._places[fetched])

    def _fetch(self, place: _Place) -> int:
        for start in range(place.start, place.stop, CHUNK):
            os.posix_fadvise(place.file, start, min(CHUNK, place.stop - start), os.POSIX_FADV_WILLNEED)
        return place.stop - place.start
