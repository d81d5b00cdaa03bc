"""TensorFiles: the bytes of a checkpoint's tensors, read or mapped, and requested from the disk in advance.

A tensor that is copied anyway is read, so that memory holds it only once: the touched pages of a mapped file stay in
the process's memory as long as one tensor of it lives. It may be used by several threads at once.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

from engine.models.checkpoint.files.read_ahead import NUM_THREADS
from engine.models.checkpoint.files.safetensors_header import StoredTensor, read_header

__all__ = ["TensorFiles"]

WINDOW = 256 * 2**20  # most bytes read ahead: more might be evicted before they are used
CHUNK = 128 * 2**10  # most bytes of one call: Linux silently ignores the rest
PART = 16 * 2**20  # bytes of a large tensor that one thread reads


class TensorFiles:
    """Open files with tensors; leaving the ``with`` closes them."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._readers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pagoda-read")
        self._lock = threading.Lock()  # protects what follows
        self._maps: dict[int, mmap.mmap] = {}
        self._expected: deque[StoredTensor] = deque()  # not yet requested, in reading order
        self._ahead: dict[StoredTensor, int] = {}  # bytes of tensors that were requested and not yet read

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._readers.shutdown()
        self._maps.clear()  # a mapping lives as long as a tensor on it
        for file in self._files:
            os.close(file)

    def open(self, path: Path) -> dict[str, StoredTensor]:
        """Open a safetensors file and return its tensors by name.

        Raises:
            ModelLoadError: if its header is malformed or does not fit its size.
            OSError: if it cannot be read.
        """
        return read_header(path, self.open_file(path))

    def open_file(self, path: Path) -> int:
        """Open a file of any format and return its descriptor; raise OSError if it cannot be read."""
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        return file

    def map(self, tensor: StoredTensor) -> torch.Tensor:
        """Return a tensor's bytes as a view of the mapped file; writing to it changes a private copy."""
        with self._lock:
            if tensor.file not in self._maps:
                self._maps[tensor.file] = mmap.mmap(tensor.file, 0, access=mmap.ACCESS_COPY)
        count = tensor.stop - tensor.start
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._maps[tensor.file], dtype=torch.uint8, count=count, offset=tensor.start)

    def read_into(self, memory: memoryview, tensor: StoredTensor, offset: int = 0) -> None:
        """Fill ``memory`` with a tensor's bytes from ``offset`` on.

        Raises:
            OSError: if the file has become shorter since it was opened.
        """
        first = tensor.start + offset
        assert first + len(memory) <= tensor.stop
        if len(memory) <= PART:
            _read(tensor, memory, first)
            return
        parts = range(0, len(memory), PART)  # else the caller's other threads would wait for this one
        for _ in self._readers.map(lambda part: _read(tensor, memory[part : part + PART], first + part), parts):
            pass

    # --- reading ahead ------------------------------------------------------------------------------------------

    def expect(self, tensors: Iterable[StoredTensor]) -> None:
        """Set the tensors that will be read next, in order."""
        self._expected = deque(tensors)
        self._ahead = {}

    def reached(self, tensor: StoredTensor) -> None:
        """Request the tensors after ``tensor``, which is read now, up to the size of the window."""
        requested = []
        with self._lock:
            self._ahead.pop(tensor, None)
            while self._expected and sum(self._ahead.values()) < WINDOW:
                following = self._expected.popleft()
                if following != tensor:
                    self._ahead[following] = following.stop - following.start
                    requested.append(following)
        for following in requested:
            _fetch(following)


def _read(tensor: StoredTensor, memory: memoryview, start: int) -> None:
    """Fill ``memory`` with the bytes of the tensor's file from ``start`` on."""
    while len(memory):
        count = os.preadv(tensor.file, [memory], start)
        if count == 0:
            raise OSError(f"'{tensor.path}' has become shorter")
        memory, start = memory[count:], start + count


def _fetch(tensor: StoredTensor) -> None:
    """Ask the system to read a tensor ahead, if it can."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is advice, which some file systems do not take
            for start in range(tensor.start, tensor.stop, CHUNK):
                os.posix_fadvise(tensor.file, start, min(CHUNK, tensor.stop - start), os.POSIX_FADV_WILLNEED)
