"""Prefaulter: gives the blocks of a CPU's KV cache their memory before a step writes to them.

Memory that nobody has used yet is given page by page when it is first written. A step that comes to new pages pays for
that, and with it every stream in the batch. Blocks that were never used are handed out in order, so it is known which
come next: a thread of the C library's sees to those whenever a core has nothing else to do. The whole pool is not taken
at once, as most of a large one may never be used.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from kernels.cpu.library import require

__all__ = ["Prefaulter"]

_BLOCKS_WORTH_A_THREAD = 8


class Prefaulter:
    """Keeps some unused blocks ready, until it is collected.

    Args:
        parts: tensors ``[num_blocks, ...]`` that make up the blocks, contiguous and alike.
        num_ahead: blocks to have ready beyond those in use.
        is_polite: leave the cores to whoever else wants them.
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_ahead: int, *, is_polite: bool = True) -> None:
        self._parts = parts  # the library has their addresses only
        self._num_blocks, self._num_ahead, self._num_wanted = len(parts[0]), num_ahead, 0
        self._library = require()
        new = self._library.pagoda_prefault_new
        new.restype = ctypes.c_void_p
        addresses = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        self._handle = ctypes.c_void_p(
            new(
                addresses,
                ctypes.c_int64(len(parts)),
                ctypes.c_int64(parts[0][0].nbytes),
                ctypes.c_int64(self._num_blocks),
                ctypes.c_int32(is_polite),
            )
        )
        if not self._handle:
            raise MemoryError("no memory is left for the prefaulter")
        weakref.finalize(self, self._library.pagoda_prefault_free, self._handle)

    def use(self, block_id: int) -> None:
        """Say that a block is about to be written; returns at once."""
        num_wanted = min(block_id + 1 + self._num_ahead, self._num_blocks)
        if num_wanted >= min(self._num_wanted + _BLOCKS_WORTH_A_THREAD, self._num_blocks) > self._num_wanted:
            self._num_wanted = num_wanted
            self._library.pagoda_prefault_want(self._handle, ctypes.c_int64(num_wanted))

    @property
    def num_ready(self) -> int:
        """Blocks that have their memory; all of them where the system cannot give it beforehand."""
        num_ready = self._library.pagoda_prefault_num_ready
        num_ready.restype = ctypes.c_int64
        return int(num_ready(self._handle))
