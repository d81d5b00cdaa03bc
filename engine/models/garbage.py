"""without_garbage_collection: a context in which Python's cyclic garbage collector does not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_garbage_collection"]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the collector, and enable it again at the end if it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
