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
    queue: asyncio.Queue[tuple[Item | _End, asyncio.Event]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            item, taken = await queue.get()
            taken.set()
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


async def _pump(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[tuple[Item | _End, asyncio.Event]]) -> None:
    """Move one stream's items, and its end, to the queue; the next item is asked for when the last one was taken."""
    taken = asyncio.Event()
    try:
        async with aclosing(stream):
            async for item in stream:
                taken.clear()
                queue.put_nowait((item, taken))
                await taken.wait()
        queue.put_nowait((_End(), taken))
    except Exception as error:
        queue.put_nowait((_End(error), taken))
