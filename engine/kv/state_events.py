"""StateEvents: reports after which published blocks a prefix hit may resume, for a model with states.

Snapshots come, go and move many times in a step, and one may hang on a block that is published only later. So the
changes of a step are what its end differs in from the last report; only blocks whose snapshot has changed are visited.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as GenericSequence

from engine.kv.block_pool import Block
from engine.kv.events import KVEvent, StateRemoved, StateStored

__all__ = ["StateEvents"]


class StateEvents:
    """Compares the published blocks that have a snapshot with those that were reported.

    Args:
        blocks: the pool's, by id.
        snapshots: the ids of the blocks that have a snapshot.
        record: collect changes; without it ``take`` returns none.
    """

    def __init__(self, blocks: GenericSequence[Block], snapshots: Container[int], *, record: bool) -> None:
        self._blocks, self._snapshots, self._record = blocks, snapshots, record
        self._changed: set[int] = set()  # ids of blocks that must be compared
        self._reported: dict[int, int] = {}  # block id -> the hash of which a state was reported

    def changed(self, block_id: int) -> None:
        """Note that a block may have got or lost its snapshot."""
        if self._record:
            self._changed.add(block_id)

    def cleared(self) -> None:
        """Note that no block is published any more, which the prefix cache reports."""
        self._reported.clear()

    def take(self) -> tuple[KVEvent, ...]:
        """Return what has changed since the last call; to be applied after the prefix cache's events."""
        if not self._changed:
            return ()
        removed: set[int] = set()
        stored: set[int] = set()
        unpublished: set[int] = set()
        for block_id in self._changed:
            has_snapshot = block_id in self._snapshots
            block_hash = self._blocks[block_id].block_hash if has_snapshot else None
            if has_snapshot and block_hash is None:
                unpublished.add(block_id)
            reported = self._reported.pop(block_id, None)
            if reported is not None:
                removed.add(reported)
            if block_hash is not None:
                stored.add(block_hash)
                self._reported[block_id] = block_hash
        self._changed = unpublished
        # A hash that is in both has moved to another block.
        return (*map(StateRemoved, removed - stored), *map(StateStored, stored - removed))
