"""Prefaulter: gives the blocks of a CPU's KV cache their memory before a step writes to them.

Memory that nobody has used yet is given page by page when it is first written. A step that comes to new pages pays for
that, and with it every stream in the batch. Blocks that were never used are handed out in order, so it is known which
come next: a thread sees to those whenever a core has nothing else to do. The whole pool is not taken at once, as most
of a large one may never be used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from kernels.cpu.memory import populate

__all__ = ["Prefaulter"]

_BLOCKS_AT_ONCE = 8  # whose memory is worth a thread


class Prefaulter:
    """Keeps some unused blocks ready.

    Args:
        parts: tensors ``[num_blocks, ...]`` that make up the blocks; each is contiguous.
        num_ahead: blocks to have ready beyond those in use.
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_ahead: int) -> None:
        self._parts, self._num_blocks, self._num_ahead = parts, len(parts[0]), num_ahead
        self._num_wanted = self._num_ready = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # only while there is something to do

    def use(self, block_id: int) -> None:
        """Say that a block is about to be written; returns at once."""
        num_wanted = min(block_id + 1 + self._num_ahead, self._num_blocks)
        if num_wanted < min(self._num_wanted + _BLOCKS_AT_ONCE, self._num_blocks) or num_wanted == self._num_wanted:
            return
        with self._lock:
            self._num_wanted = num_wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefaulter")
                self._thread.start()

    def wait(self) -> None:
        """Return when what is wanted so far is ready."""
        if (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        while True:
            with self._lock:
                if self._num_ready >= self._num_wanted:
                    self._thread = None
                    return
                first, self._num_ready = self._num_ready, min(self._num_ready + _BLOCKS_AT_ONCE, self._num_wanted)
                end = self._num_ready
            for part in self._parts:
                # Not on this system, or the program ends, which waits for this thread.
                if not populate(part[first:end]) or not threading.main_thread().is_alive():
                    with self._lock:
                        self._num_ready = self._num_wanted = self._num_blocks
                    break
