"""The compiled C kernels as one ctypes library, or the knowledge that this machine has none.

A call releases the interpreter's lock, so other threads of the process, an event loop say, go on meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

from kernels.cpu.build import BuildError, build

__all__ = ["library", "set_num_threads"]

logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled now if need be; None where it cannot be had, with a warning that says why.

    ``PAGODA_CPU_KERNELS=0`` in the environment asks to do without it.
    """
    if os.environ.get("PAGODA_CPU_KERNELS") == "0":
        return None
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        logger.warning("No CPU kernels, torch's operators will be used, which are slower: %s", error)
        return None


def set_num_threads(count: int) -> None:
    """Let ``count`` threads compute, the caller's own among them; nothing may be computing meanwhile."""
    loaded = library()
    if loaded is not None:
        loaded.pagoda_set_num_threads(count)
