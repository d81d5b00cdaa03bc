"""read_ahead: reads tensors on several threads while the caller processes earlier ones, and yields them in order.

One thread reads no faster than it copies. Several threads also queue more requests at the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kernels.cgroup import available_cpus

__all__ = ["NUM_THREADS", "read_ahead"]

NUM_THREADS = min(4, available_cpus())
MAX_BYTES = 256 * 2**20  # read and not yet processed; a larger tensor is read alone

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def read_ahead(
    items: Iterable[_Item],
    read: Callable[[_Item], _Result],
    num_bytes: Callable[[_Item], int],
    max_bytes: int | None = None,
) -> Generator[tuple[_Item, _Result], None, None]:
    """Yield each item and what ``read`` returns for it, in order. The first error that is reached ends it.

    Args:
        items: what to read.
        read: is called in other threads, for several items at once.
        num_bytes: the memory that the result of an item takes.
        max_bytes: limit of what is read and not yet processed, if it should be less than usual.
    """
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    ahead = 0
    limit = MAX_BYTES if max_bytes is None else min(MAX_BYTES, max_bytes)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pagoda-load") as pool:
        try:
            for item in items:
                while waiting and ahead + num_bytes(item) > limit:
                    ahead -= num_bytes(waiting[0][0])
                    yield _next(waiting)
                waiting.append((item, pool.submit(read, item)))
                ahead += num_bytes(item)
            while waiting:
                yield _next(waiting)
        finally:  # an error, or the caller stops early
            for _, future in waiting:
                future.cancel()


def _next(waiting: deque[tuple[_Item, Future[_Result]]]) -> tuple[_Item, _Result]:
    """Remove the first item and return its result, which nothing here refers to any longer."""
    item, future = waiting.popleft()
    return item, future.result()
