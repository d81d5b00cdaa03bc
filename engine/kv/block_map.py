"""BlockMap: a summary of the block pool's states, small enough to be read every second.

Any thread may read the blocks while the engine's thread changes them, without a lock: the list of blocks is constant,
and a block that changes at that moment appears in its old or its new state. Large pools are read slice by slice, so
that the reader never holds the GIL for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass

from engine.kv.block_pool import Block, BlockCounts

__all__ = ["BlockMap", "cell_size", "cells_by_slice"]

_FREE, _CACHED, _USED, _SHARED = range(4)
_MOST_PER_CELL = 255  # the largest count that fits a byte
_SLICE = 4096  # blocks


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The states of a pool's blocks, counted in cells of adjacent blocks. It can be pickled.

    ``cells`` has three bytes for each cell: how many of its blocks are cached (free, but their prefix can be hit),
    how many are used by one sequence, and how many are shared by several sequences. The others are free.
    """

    num_blocks: int
    blocks_per_cell: int  # the last cell may have fewer
    cells: bytes

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state, as ``BlockPool.counts`` does."""
        cached, used, shared = (sum(self.cells[state::3]) for state in range(3))
        return BlockCounts(self.num_blocks - cached - used - shared, cached, used + shared, shared)


def cell_size(num_blocks: int, max_cells: int) -> int:
    """Return the blocks per cell for at most ``max_cells`` cells; large pools need more, as a cell counts to 255."""
    return min(max(1, -(-num_blocks // max_cells)), _MOST_PER_CELL)


def cells_by_slice(blocks: GenericSequence[Block], size: int) -> Iterator[bytes]:
    """Yield ``BlockMap.cells`` for cells of ``size`` blocks, one slice of the pool at a time."""
    step = max(1, _SLICE // size) * size
    for start in range(0, len(blocks), step):
        states = bytes(
            [  # inline: a call for each block takes twice as long
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
