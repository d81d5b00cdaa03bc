"""KeptSnapshots: the snapshots that move along with answers, from block to block, until these end.

A sequence keeps one snapshot, at the last full block of its answer. Forks share it until they reach another block. It
stays where it is, whatever the sequences do that have kept it, if another sequence needs it there: a prompt that ends
or resumes there, or an answer that has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.block_pool import Block
from engine.sequence import Sequence

__all__ = ["STAYS", "KeptSnapshots"]

STAYS = -1  # content id of a snapshot that moves with no answer


class KeptSnapshots:
    """Which sequences keep which snapshot; ``Sequence.kept_snapshot`` is its block and its content id.

    Args:
        snapshots: the slots that hang on blocks.
    """

    def __init__(self, snapshots: AttachedPages) -> None:
        self._snapshots = snapshots
        self._next_content_id = 0
        self._num_keepers: Counter[int] = Counter()  # by content id

    def block_of(self, sequence: Sequence) -> int | None:
        """Return the block on which the snapshot of a sequence's answer hangs, if it still moves with that."""
        if sequence.kept_snapshot is None:
            return None
        block_id, content_id = sequence.kept_snapshot
        slot = self._snapshots.by_block.get(block_id)
        return block_id if slot is not None and slot.content_id == content_id else None

    def keep(self, sequence: Sequence, block: Block, slot: Block) -> None:
        """Let a snapshot on a block move with a sequence's answer, which keeps none yet; others may keep it too."""
        if slot.content_id == STAYS:
            slot.content_id, self._next_content_id = self._next_content_id, self._next_content_id + 1
        sequence.kept_snapshot = block.block_id, slot.content_id
        self._num_keepers[slot.content_id] += 1

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let a fork keep what its parent keeps."""
        if (block_id := self.block_of(parent)) is not None:
            slot = self._snapshots.by_block[block_id]
            child.kept_snapshot = block_id, slot.content_id
            self._num_keepers[slot.content_id] += 1

    def move_on(self, sequence: Sequence) -> None:
        """Free a sequence's snapshot, if no other sequence keeps it: the answer has filled another block."""
        block_id = self.block_of(sequence)
        is_last = self._leave(sequence)
        if block_id is not None and is_last:
            self._snapshots.detach(block_id)

    def end(self, sequence: Sequence) -> None:
        """Let the snapshot of a sequence that ends stay on its block."""
        if (block_id := self.block_of(sequence)) is not None:
            self._snapshots.by_block[block_id].content_id = STAYS
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> bool:
        """Keep a sequence's snapshot no more; whether it kept one that no other sequence keeps."""
        if sequence.kept_snapshot is None:
            return False
        _, content_id = sequence.kept_snapshot
        sequence.kept_snapshot = None
        self._num_keepers[content_id] -= 1
        is_last = not self._num_keepers[content_id]
        if is_last:
            del self._num_keepers[content_id]
        return is_last

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Assert that the sequences that keep snapshots are counted."""
        kept = Counter(sequence.kept_snapshot[1] for sequence in sequences if sequence.kept_snapshot is not None)
        assert self._num_keepers == kept, "the count of sequences that keep a snapshot is off"
