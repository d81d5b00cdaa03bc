"""BlockMap: a picture of the block pool that is small enough to be looked at every second.

It reads the blocks from whatever thread asks, while the engine's thread changes them. Nobody waits: the list of blocks
never changes, each field that is read is an object of its own, and a block that changes right then is shown as it was
or as it is going to be. Big pools are read a slice at a time, so that the interpreter's lock is never held for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

from engine.kv.block_pool import Block, BlockCounts

__all__ = ["BlockMap", "cell_size", "cells_by_slice"]

_FREE, _CACHED, _USED, _SHARED = range(4)
_MOST_PER_CELL = 255  # what a byte can count
_SLICE = 4096  # blocks


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The states of a pool's blocks, a few neighbours to a cell. It pickles small.

    ``cells`` holds three bytes for each cell: how many of its blocks are cached (free, but their prefix can be hit),
    how many one sequence uses, and how many several sequences share. The others are free.
    """

    num_blocks: int
    blocks_per_cell: int  # the last cell may have fewer
    cells: bytes

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state, as ``BlockPool.counts`` does."""
        cached, used, shared = (sum(self.cells[state::3]) for state in range(3))
        return BlockCounts(self.num_blocks - cached - used - shared, cached, used + shared, shared)


def cell_size(num_blocks: int, max_cells: int) -> int:
    """Return how many blocks make a cell, so that there are at most ``max_cells``, unless a cell would be too full."""
    return min(-(-num_blocks // max_cells), _MOST_PER_CELL)


def cells_by_slice(blocks: Sequence_[Block], size: int) -> Iterator[bytes]:
    """Yield the cells of ``size`` blocks that make a BlockMap's ``cells``, a slice of the pool at a time."""
    step = max(1, _SLICE // size) * size
    for start in range(0, len(blocks), step):
        states = bytes(
            [  # in line: a call for each block would take twice as long
                (_USED if references == 1 else _SHARED)
                if (references := block.ref_count)
                else (_FREE if block.block_hash is None else _CACHED)
                for block in blocks[start : start + step]
            ]
        )
        yield bytes(
            states.count(state, first, first + size)
            for first in range(0, len(states), size)
            for state in (_CACHED, _USED, _SHARED)
        )
