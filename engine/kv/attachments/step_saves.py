"""StepSaves: the snapshots that a step's prefills write while they compute.

Each has a slot from the moment it is planned. When the step has been planned as a whole, it hangs on its block, so that
the next step can match it.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import NamedTuple

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.block_pool import Block
from engine.sequence import Sequence

__all__ = ["StepSaves"]


class _Save(NamedTuple):
    """A snapshot that a prefill writes, to hang on a block if that holds the same content then."""

    sequence: Sequence
    num_tokens: int
    content_id: int
    slot: Block
    is_likely: bool


class StepSaves:
    """The planned snapshots of the next step.

    Args:
        snapshots: the slots that hang on blocks.
        blocks: the blocks.
        interval: tokens of a prefill after each of which an unlikely snapshot is kept; 0: none.
    """

    def __init__(self, snapshots: AttachedPages, blocks: GenericSequence[Block], interval: int) -> None:
        self._snapshots, self._blocks = snapshots, blocks
        self._interval = interval
        self._saves: dict[int, _Save] = {}  # by the id of the block to hang on

    def __len__(self) -> int:
        return len(self._saves)

    def positions_within(self, start: int, end: int) -> range:
        """Return the multiples of the interval after ``start`` and up to ``end``, which are tokens of a prefill."""
        step = self._interval
        return range(start + step - start % step, end + 1, step) if step else range(0)

    def has(self, block: Block, *, is_likely: bool) -> bool:
        """Whether another sequence with the same prefix writes the snapshot of a block; it is likely if either says so.

        One for what the block held before is dropped.
        """
        pending = self._saves.get(block.block_id)
        if pending is None:
            return False
        if pending.content_id != block.content_id:
            self._drop(block.block_id)
            return False
        self._saves[block.block_id] = pending._replace(is_likely=pending.is_likely or is_likely)
        return True

    def add(self, sequence: Sequence, num_tokens: int, block: Block, slot: Block, *, is_likely: bool) -> None:
        """Write the state after a sequence's first ``num_tokens`` tokens to a slot."""
        self._saves[block.block_id] = _Save(sequence, num_tokens, block.content_id, slot, is_likely)

    def drop_of(self, sequence: Sequence) -> None:
        """Write no snapshot of a sequence."""
        for block_id in [block_id for block_id, save in self._saves.items() if save.sequence is sequence]:
            self._drop(block_id)

    def drop_unlikely(self) -> bool:
        """Write the last unlikely snapshot no more; False if there is none."""
        unlikely = next((block_id for block_id in reversed(self._saves) if not self._saves[block_id].is_likely), None)
        if unlikely is not None:
            self._drop(unlikely)
        return unlikely is not None

    def take(self) -> dict[Sequence, list[tuple[int, int]]]:
        """Return the snapshots by sequence: how many of its tokens each one has seen, ascending, and its slot."""
        saves: dict[Sequence, list[tuple[int, int]]] = {}
        for block_id, (sequence, num_tokens, content_id, slot, is_likely) in self._saves.items():
            saves.setdefault(sequence, []).append((num_tokens, slot.block_id))
            if self._blocks[block_id].content_id == content_id and self._snapshots.by_block.get(block_id) is None:
                self._snapshots.cache(block_id, slot, is_likely=is_likely)
            else:
                self._snapshots.pages.release(slot)
        self._saves.clear()
        return saves

    def _drop(self, block_id: int) -> None:
        self._snapshots.pages.release(self._saves.pop(block_id).slot)
