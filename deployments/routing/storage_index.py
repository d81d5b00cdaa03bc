"""StorageIndex: which KV blocks each replica can read from one kind of storage, its disk or the shared cache.

Storage may hold the continuation of a prefix that memory holds, or all of it. So what a replica need not compute of a
prompt is a run of blocks in memory, and then a run on storage. Of the shared cache, each replica reports what it knows:
another one may have written it, and not all replicas need have the cache.

It takes no lock: the caller holds that of RoutingState.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["StorageIndex"]


class StorageIndex:
    """The blocks that the replicas can read from one kind of storage."""

    def __init__(self) -> None:
        self._saved: dict[str, set[int]] = {}

    def __bool__(self) -> bool:
        """Whether any replica has saved a block."""
        return bool(self._saved)

    def saved(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica can read these blocks."""
        self._saved.setdefault(replica, set()).update(hashes)

    def unsaved(self, replica: str, hashes: Iterable[int]) -> None:
        """Record that a replica can no longer read these blocks."""
        if (saved := self._saved.get(replica)) is not None:
            saved.difference_update(hashes)

    def remove_replica(self, replica: str) -> None:
        """Forget everything that a replica can read."""
        self._saved.pop(replica, None)

    def blocks(self, replica: str) -> frozenset[int]:
        """Return the saved blocks of a replica."""
        return frozenset(self._saved.get(replica, ()))

    def num_held_blocks(self, hashes: Sequence[int], in_memory: Mapping[str, int]) -> dict[str, int]:
        """Return how many leading blocks of a prompt memory and storage hold, of replicas whose storage adds some.

        Args:
            hashes: of the prompt's blocks, in order.
            in_memory: how many leading blocks each replica's memory holds; absent means none.
        """
        held = {}
        for name, saved in self._saved.items():
            first = in_memory.get(name, 0)
            if first < len(hashes) and hashes[first] in saved:
                held[name] = _run_end(hashes, first, saved)
        return held


def _run_end(hashes: Sequence[int], first: int, saved: Collection[int]) -> int:
    """Return the end of the run of saved blocks that begins at ``first``; storage loses suffixes first."""
    low, high = first + 1, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in saved:
            low = middle + 1
        else:
            high = middle
    return low
