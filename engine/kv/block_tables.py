"""The block tables of the running sequences as each rank has them, kept from step to step.

A decode appends a block to its table once in ``block_size`` tokens, so a step sends only what has changed:

    lists of the BlockManager -> TableTracker, on rank 0 -> TableChanges, in the step's plan -> BlockTables, each rank's

A table has one row of the array for as long as its sequence is in every batch. The BlockManager owns the tables; this
module does not know which blocks are free or what they hold.
"""

from __future__ import annotations

from operator import is_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BlockTables", "TableChanges", "TableTracker"]


class TableChanges(NamedTuple):
    """What one step changes in the array of block tables."""

    entries: npt.NDArray[np.int64]  # indices into the flattened array, all different
    block_ids: npt.NDArray[np.int32]  # what to write there; -1 after the end of a table


_NO_CHANGES = TableChanges(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))


class TableTracker:
    """Finds what has changed in the block tables since the last batch, without comparing their blocks.

    It relies on the BlockManager: a table is one list that grows at its end and loses only blocks of drafts, which
    ``expect_removal`` announces. Whatever else happens to a sequence's blocks gives it another list.

    Args:
        num_rows: sequences in a batch, at most.
        max_blocks: blocks of a sequence, at most.

    Attributes:
        array: int32 [num_rows, max_blocks], padded with -1: what the BlockTables of every rank hold after the changes.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.array = np.full((num_rows, max_blocks), -1, dtype=np.int32)
        self._num_written = np.zeros(num_rows, dtype=np.int64)  # of each row: entries that are not -1
        self._num_kept = np.zeros(num_rows, dtype=np.int64)  # of each row: leading entries that are still right
        self._free_rows = list(range(num_rows))
        # The last batch. These references keep the lists alive, so that no new list has the same identity.
        self._tables: list[list[int]] = []
        self._rows = np.empty(0, dtype=np.int64)
        self._lengths: list[int] | None = None  # of the last batch's tables; None if they may have to be sent again

    def update(self, tables: list[list[int]]) -> tuple[npt.NDArray[np.int64], TableChanges]:
        """Return the row of each table of a batch, int64 [num_seqs], and what the ranks must write before they read."""
        if len(tables) != len(self._tables) or not all(map(is_, tables, self._tables)):
            self._assign_rows(tables)
        rows, counts = self._rows, list(map(len, tables))
        if counts == self._lengths:
            return rows, _NO_CHANGES
        self._lengths, lengths = counts, np.array(counts, dtype=np.int64)
        kept, written = self._num_kept[rows], self._num_written[rows]
        changed = np.flatnonzero((kept < lengths) | (written > lengths))
        self._num_kept[rows] = self._num_written[rows] = lengths
        return rows, self._write(tables, changed, kept[changed], np.maximum(lengths, written)[changed])

    def expect_removal(self, position: int, num_kept: int) -> None:
        """Expect that a table of the last batch loses blocks: the ones after its first ``num_kept`` are sent again."""
        self._num_kept[self._rows[position]] = num_kept
        self._lengths = None

    def forget(self) -> None:
        """Send every table again in full: the ranks may not have received the last changes."""
        self._free_rows = list(range(len(self.array)))
        self._tables, self._rows, self._lengths = [], np.empty(0, dtype=np.int64), None
        self._num_written[:] = self.array.shape[1]

    def _assign_rows(self, tables: list[list[int]]) -> None:
        """Give each new table the row of one that has left the batch."""
        held = dict(zip(map(id, self._tables), self._rows.tolist(), strict=True))
        rows = [held.pop(id(table), -1) for table in tables]
        self._free_rows += held.values()
        for position, row in enumerate(rows):
            if row < 0:
                rows[position] = row = self._free_rows.pop()
                self._num_kept[row] = 0
        self._tables, self._rows, self._lengths = tables, np.array(rows, dtype=np.int64), None

    def _write(
        self,
        tables: list[list[int]],
        changed: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> TableChanges:
        """Write the entries from ``starts`` to ``ends`` of the changed tables; return them."""
        entries: list[int] = []
        block_ids: list[int] = []
        width = self.array.shape[1]
        row_starts = (self._rows[changed] * width).tolist()
        for position, start, end, row_start in zip(
            changed.tolist(), starts.tolist(), ends.tolist(), row_starts, strict=True
        ):
            table = tables[position]
            assert len(table) <= width, f"a sequence has {len(table)} blocks, and at most {width} were expected"
            entries += range(row_start + start, row_start + end)
            block_ids += table[start:]
            block_ids += [-1] * (end - len(table))
        changes = TableChanges(np.array(entries, dtype=np.int64), np.array(block_ids, dtype=np.int32))
        self.array.reshape(-1)[changes.entries] = changes.block_ids
        return changes


class BlockTables:
    """One rank's array of block tables, on its device.

    Args:
        num_rows: sequences in a batch, at most.
        max_blocks: blocks of a sequence, at most.
        device: device on which attention reads them.
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self._array = torch.full((num_rows, max_blocks), -1, dtype=torch.int32, device=device)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and blocks in a row."""
        return self._array.shape[0], self._array.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the array."""
        return self._array.device

    def write(self, entries: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Write the changes of a step, which are on the same device: see TableChanges. None may be left out."""
        if len(entries):
            self._array.view(-1).index_copy_(0, entries, block_ids)

    def select(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return the first ``num_blocks`` blocks of these rows, int32 [len(rows), num_blocks], contiguous."""
        return self._array[:, :num_blocks].index_select(0, rows)
