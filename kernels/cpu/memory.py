"""Large tensors on huge pages: weights and KV are streamed, and with small pages looking up addresses takes a fifth.

And pages that are there before they are used.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from functools import cache

import torch

__all__ = ["huge_zeros", "populate"]

_HUGE_PAGE = 2 * 2**20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python does not name it


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros, on huge pages where the system has them and the tensor fills one; untouched memory takes none.

    Raises:
        RuntimeError: if there is no such memory, as torch does.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE or _ADVICE is None:
        return torch.zeros(shape, dtype=dtype)
    try:
        # It lives as long as a tensor on it. Shared memory, Python's default, gets no huge pages.
        memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(f"{size} bytes cannot be had: {error}") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    with suppress(OSError):  # a kernel without them
        memory.madvise(_ADVICE, start, size // _HUGE_PAGE * _HUGE_PAGE)  # what is left over would waste most of one
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def populate(tensor: torch.Tensor) -> bool:
    """Have the system give a contiguous tensor its memory now and not when it is first written; its elements stay.

    A huge page's first use takes a fraction of a millisecond, and milliseconds on a virtual machine whose host must
    find the memory too. The call lets other threads run meanwhile, and they may read and write the tensor.

    Returns:
        Whether the system did; one that cannot leaves it to the first use.
    """
    if _ADVICE is None or not tensor.numel():
        return False
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.numel() * tensor.element_size() - start
    done: int = _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE))
    return done == 0
