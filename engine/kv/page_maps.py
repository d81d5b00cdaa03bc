"""PageMap: which page of a window hangs on each block, as the planner and each rank have it.

A window's layers read and write pages of their own pool. A block table of such pages is the sequence's block table,
looked up in the map:

    block table  [ 4  9  2  7  5 ]      map  { 2: 1, 5: 3, 7: 0, ... }      pages  [ ?  ?  1  0  3 ]

What lies beyond the window may be any page, or -1: no kernel reads it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["HostPageMap", "PageMap"]


class HostPageMap:
    """The map on rank 0's host, from which slots are computed.

    Args:
        num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pages = np.full(num_blocks, -1, dtype=np.int32)
        self._is_sent = True  # whether the ranks have the map as it was before the next changes

    def update(
        self, blocks: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Take a step's changes; return what the ranks must change before they compute it."""
        self._pages[blocks] = pages
        if self._is_sent:
            return blocks, pages
        self._is_sent = True
        return np.arange(len(self._pages)), self._pages.copy()

    def forget(self) -> None:
        """Send the whole map with the next changes: the ranks may not have received the last ones."""
        self._is_sent = False

    def slots(self, slots: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
        """Return the slots of pages for those of blocks, [num_tokens]; -1 stays -1."""
        pages = self._pages[slots // block_size].astype(np.int64)
        return np.where(slots < 0, -1, pages * block_size + slots % block_size)


class PageMap:
    """One rank's map, on its device.

    Args:
        num_blocks: blocks of the pool.
        device: on which attention reads block tables.
    """

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._pages = torch.full((num_blocks + 1,), -1, dtype=torch.int32, device=device)  # the last one is for -1

    def write(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Make the changes of a step, which are on the same device."""
        if len(blocks):
            self._pages.index_copy_(0, blocks, pages)

    def look_up(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Return the pages of block tables, int32 [num_seqs, num_blocks], contiguous; -1 stays -1."""
        return self._pages[block_tables.long()]
