"""merge: several asynchronous streams as one, for requests with several prompts.

It knows nothing of what the streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

__all__ = ["merge"]

Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield (index of the stream, item) as items come; the first error ends all, and closing this closes all."""
    if len(streams) == 1:  # nearly every request: no queue, no task
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, BaseException):
                raise entry
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[Item, None], queue: asyncio.Queue[tuple[int, Item] | BaseException | None]
) -> None:
    """Move one stream's items, and how it ended, to the queue."""
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((index, item))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
