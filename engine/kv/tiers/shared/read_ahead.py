"""ReadAhead: reads the objects of one prefix, several at a time, because each takes a round trip or two."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future

from engine.kv.tiers.disk.slot_header import SlotHeader
from engine.kv.tiers.reading import Slots
from engine.kv.tiers.shared.object_name import ObjectName
from engine.kv.tiers.shared.object_store import ObjectStore

__all__ = ["ReadAhead"]


class ReadAhead:
    """A ``PageReader``. The pages are asked for in the order of ``slots``.

    Args:
        store: the objects.
        executor: of the threads that read.
        slots: all pages that are going to be read.
        block_size: tokens per block.
        num_ahead: objects that are read at a time.
    """

    def __init__(
        self, store: ObjectStore, executor: Executor, slots: Slots[ObjectName], block_size: int, num_ahead: int
    ) -> None:
        self._store = store
        self._executor = executor
        self._block_size = block_size
        self._names: Iterator[ObjectName] = (name for of_block in slots for name in of_block if name is not None)
        self._reads: deque[Future[bytes]] = deque()
        for _ in range(num_ahead):
            self._begin()

    def read(self, kind: int, slot: ObjectName, page: memoryview) -> SlotHeader | None:
        """Read a page; return its header, or None if that, or the object's length, is not right.

        Raises:
            FileNotFoundError: if the object is gone.
            OSError: if the storage fails.
        """
        data = self._reads.popleft().result()
        self._begin()
        if len(data) != self._store.num_bytes(kind):
            return None
        page[:] = memoryview(data)[len(data) - len(page) :]
        return SlotHeader.unpack(data, self._block_size)

    def close(self) -> None:
        """Do not read what has not begun."""
        for read in self._reads:
            read.cancel()

    def _begin(self) -> None:
        if (name := next(self._names, None)) is not None:
            self._reads.append(self._executor.submit(self._store.read, name))
