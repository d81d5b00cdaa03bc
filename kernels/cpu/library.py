"""The compiled C library of this process, or None on a machine that cannot have one.

A call releases the interpreter's lock, so the process's other threads, an event loop say, run meanwhile.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

from kernels.cpu.bindings import Library, load
from kernels.cpu.build import BuildError, build

__all__ = ["library", "require", "set_num_threads"]

logger = logging.getLogger(__name__)


@cache
def library() -> Library | None:
    """Return the library, compiling it now if necessary; None, with a warning that says why, if that fails.

    ``PAGODA_CPU_KERNELS=0`` in the environment disables it.
    """
    if os.environ.get("PAGODA_CPU_KERNELS") == "0":
        return None
    try:
        return _load(build())
    except (BuildError, OSError) as error:
        logger.warning("No CPU kernels, torch's operators will be used, which are slower: %s", error)
        return None


def _load(path: Path) -> Library:
    try:
        return load(path)
    except OSError:  # damaged, by a disk that was full for example
        path.unlink(missing_ok=True)
        return load(build())


def require() -> Library:
    """Return the library to a caller that has checked that it is available."""
    loaded = library()
    assert loaded is not None, "library() is None: callers check that before they call a kernel"
    return loaded


def set_num_threads(count: int) -> None:
    """Set how many threads compute, the caller's own among them, for all engines of the process."""
    loaded = library()
    if loaded is not None:
        loaded.pagoda_set_num_threads(count)
