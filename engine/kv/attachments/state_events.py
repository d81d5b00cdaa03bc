"""StateEvents: reports after which published blocks a prefix hit may resume, for a model with states.

Snapshots come, go and move many times in a step, and one may hang on a block that is published only later. So the
changes of a step are what its end differs in from the last report; only blocks whose snapshot has changed are visited.
A snapshot on the host counts like one on the device.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as GenericSequence

from engine.kv.block_pool import Block
from engine.kv.events import KVEvent, StateRemoved, StateStored
from engine.kv.host.block_store import BlockStore

__all__ = ["StateEvents"]


class StateEvents:
    """Compares the published blocks that have a snapshot with those that were reported.

    Args:
        blocks: those of the device, by id.
        host: the store of snapshots.
        record: collect changes; without it ``take`` returns none.

    Attributes:
        snapshots: ids of the blocks of the device that have a snapshot.
    """

    def __init__(self, blocks: GenericSequence[Block], host: BlockStore, *, record: bool) -> None:
        self.snapshots: Container[int] = ()
        self._blocks, self._host, self._record = blocks, host, record
        self._changed: set[int] = set()  # ids of blocks that must be compared
        self._changed_on_host: set[int] = set()  # hashes that must be compared
        self._hash_of: dict[int, int] = {}  # block id -> the hash of which the device has a snapshot
        self._on_device: set[int] = set()  # these hashes
        self._reported: set[int] = set()  # hashes

    def changed(self, block_id: int) -> None:
        """Note that a block of the device may have got or lost its snapshot."""
        if self._record:
            self._changed.add(block_id)

    def changed_on_host(self, block_hash: int) -> None:
        """Note that the host may have got or lost the snapshot of a block."""
        if self._record:
            self._changed_on_host.add(block_hash)

    def cleared(self) -> None:
        """Note that no block is published any more, which the prefix cache reports."""
        self._reported.clear()

    def take(self) -> tuple[KVEvent, ...]:
        """Return what has changed since the last call; to be applied after the prefix cache's events."""
        if not self._changed and not self._changed_on_host:
            return ()
        touched, self._changed_on_host = self._changed_on_host, set()
        touched |= self._compare_device()
        now = {block_hash for block_hash in touched if self._has_snapshot(block_hash)}
        before = touched & self._reported
        self._reported -= touched
        self._reported |= now
        return (*map(StateRemoved, before - now), *map(StateStored, now - before))

    def _compare_device(self) -> set[int]:
        """Note which published blocks of the device have a snapshot now; return the hashes of those that changed."""
        removed: set[int] = set()
        stored: dict[int, int] = {}
        unpublished: set[int] = set()
        for block_id in self._changed:
            if block_id in self._hash_of:
                removed.add(self._hash_of.pop(block_id))
            if block_id not in self.snapshots:
                continue
            block_hash = self._blocks[block_id].block_hash
            if block_hash is None:
                unpublished.add(block_id)
            else:
                stored[block_id] = block_hash
        self._changed = unpublished
        self._hash_of |= stored
        self._on_device -= removed
        self._on_device.update(stored.values())
        return removed.union(stored.values())

    def _has_snapshot(self, block_hash: int) -> bool:
        return block_hash in self._on_device or block_hash in self._host.by_name
