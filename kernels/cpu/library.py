"""The compiled C kernels as one ctypes library, or the knowledge that this machine has none.

A call releases the interpreter's lock, so other threads of the process, an event loop say, go on meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

from kernels.cpu.build import BuildError, build

__all__ = ["library", "pointer", "require", "set_num_threads"]

logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled now if need be; None where it cannot be had, with a warning that says why.

    ``PAGODA_CPU_KERNELS=0`` in the environment asks to do without it.
    """
    if os.environ.get("PAGODA_CPU_KERNELS") == "0":
        return None
    try:
        return _load(build())
    except (BuildError, OSError) as error:
        logger.warning("No CPU kernels, torch's operators will be used, which are slower: %s", error)
        return None


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # damaged, by a disk that was full for example
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(build()))


def require() -> ctypes.CDLL:
    """Return the library to somebody who knows that it is there."""
    loaded = library()
    assert loaded is not None, "callers ask whether the library can be had before they use it"
    return loaded


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Return a tensor's address as an argument of a call, NULL for None; the tensor must outlive the call."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def set_num_threads(count: int) -> None:
    """Let ``count`` threads compute, the caller's own among them, for all engines of the process."""
    loaded = library()
    if loaded is not None:
        loaded.pagoda_set_num_threads(count)
