"""merge: several asynchronous streams as one, for requests with several answers.

It knows nothing of what the streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

__all__ = ["merge"]

Item = TypeVar("Item")


def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Return one stream with the items of all, as they come.

    The first error ends all streams; closing the merged stream closes them all. A single stream is returned as it is:
    nearly every request has one answer, and needs neither a queue nor a task.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """The end of one stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[Item | _End]) -> None:
    """Move one stream's items, and its end, to the queue."""
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)
        queue.put_nowait(_End())
    except Exception as error:
        queue.put_nowait(_End(error))
