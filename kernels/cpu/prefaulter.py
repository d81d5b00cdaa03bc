"""Prefaulter: has the system allocate pages for the blocks of a CPU's KV cache before a step writes to them.

Linux allocates memory page by page when it is first written. A step that reaches new pages waits for that, and with it
every stream in the batch. Blocks, pages of windows and slots of states that were never used are taken in order, so the
next ones are known: a thread of the C library makes those ready whenever a core is idle. Not the whole pool at once, as
most of a large one may never be used.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from kernels.cpu.bindings import pointers
from kernels.cpu.library import require

__all__ = ["Prefaulter"]

_BLOCKS_WORTH_A_THREAD = 8


class Prefaulter:
    """Keeps some unused blocks ready, until it is collected.

    Args:
        parts: tensors ``[num_blocks, ...]`` that make up the blocks, contiguous; a block's share of them may differ.
        num_ahead: blocks to have ready beyond those in use.
        is_polite: run only when no other thread or program needs the core.
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_ahead: int, *, is_polite: bool = True) -> None:
        self._parts = parts  # the library has their addresses only
        self._num_blocks, self._num_ahead, self._num_wanted = len(parts[0]), num_ahead, 0
        self._library = require()
        self._handle: int | None = self._library.pagoda_prefault_new(
            pointers(parts), _block_bytes(parts), len(parts), self._num_blocks, is_polite
        )
        if not self._handle:
            raise MemoryError("no memory is left for the prefaulter")
        weakref.finalize(self, self._library.pagoda_prefault_free, self._handle)

    def use(self, block_id: int) -> None:
        """Announce that a block is about to be written; returns at once."""
        num_wanted = min(block_id + 1 + self._num_ahead, self._num_blocks)
        few = max(1, min(_BLOCKS_WORTH_A_THREAD, self._num_ahead))
        if num_wanted >= min(self._num_wanted + few, self._num_blocks) > self._num_wanted:
            self._num_wanted = num_wanted
            self._library.pagoda_prefault_want(self._handle, num_wanted)

    @property
    def num_ready(self) -> int:
        """Blocks that have their memory; all of them where the system cannot allocate it beforehand."""
        return int(self._library.pagoda_prefault_num_ready(self._handle))


def _block_bytes(parts: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """Return the bytes of a block in each part."""
    return (ctypes.c_int64 * len(parts))(*(part[0].nbytes for part in parts))
