"""HostMemory: the bytes of the host pools' pages, for threads that copy them from or to elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv.tiers.page_format import PageKind

__all__ = ["HostMemory"]


class HostMemory:
    """Views of the pools' memory. A view stays valid as long as the engine; what it shows is whatever the page holds.

    Args:
        kinds: of pages, as the pools are ordered.
        pools: the memory of each pool, as bytes, ``num_pages * num_bytes``; writable.
        expect: for each pool, a call that lets the system allocate the memory of its pages up to one, and returns at
            once; empty: the system has allocated it.
    """

    def __init__(
        self, kinds: Sequence[PageKind], pools: Sequence[memoryview], expect: Sequence[Callable[[int], None]] = ()
    ) -> None:
        self.kinds = tuple(kinds)
        self._pools = pools
        self._expect = expect

    def expect(self, kind: int, page_id: int) -> None:
        """Prepare for writes to a page of the pool ``kind``. The engine's thread calls it."""
        if self._expect:
            self._expect[kind](page_id)

    def page(self, kind: int, page_id: int) -> memoryview:
        """Return the bytes of a page of the pool ``kind``."""
        size = self.kinds[kind].num_bytes
        return self._pools[kind][page_id * size : (page_id + 1) * size]
