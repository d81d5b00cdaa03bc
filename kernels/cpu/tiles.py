"""Permission to use AMX's tiles, which Linux gives to a process that asks."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

__all__ = ["tiles_granted"]

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@cache
def tiles_granted() -> bool:
    """Ask for the tiles, for all threads and forked children of the process; return whether they may be used.

    An old system, a sandbox's filter of system calls or a thread with a small signal stack refuses; so does a processor
    without tiles.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
