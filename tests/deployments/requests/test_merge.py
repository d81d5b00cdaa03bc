"""Several asynchronous streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.requests.merge import merge
from engine.errors import RequestError


async def _count(label: str, number: int) -> AsyncGenerator[str, None]:
    for index in range(number):
        await asyncio.sleep(0)
        yield f"{label}{index}"


async def test_merge_keeps_each_streams_order() -> None:
    seen = [item async for item in merge([_count("a", 3), _count("b", 5), _count("c", 0)])]
    assert [item for item in seen if item.startswith("a")] == ["a0", "a1", "a2"]
    assert [item for item in seen if item.startswith("b")] == ["b0", "b1", "b2", "b3", "b4"]
    assert len(seen) == 8


async def test_an_error_in_one_stream_ends_all() -> None:
    closed = []

    async def endless() -> AsyncGenerator[str, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield "x"
        finally:
            closed.append(True)

    async def failing() -> AsyncGenerator[str, None]:
        await asyncio.sleep(0)
        raise RequestError("no")
        yield ""

    with pytest.raises(RequestError):
        async for _ in merge([endless(), failing()]):
            pass
    assert closed == [True]


async def test_a_reader_that_lags_holds_up_all_streams() -> None:
    """What comes meanwhile waits where it is joined: no queue of items grows here."""
    pulled: list[str] = []

    async def counted(label: str) -> AsyncGenerator[str, None]:
        async for item in _count(label, 100):
            pulled.append(item)
            yield item

    async with aclosing(merge([counted("a"), counted("b")])) as items:
        await anext(items)
        for _ in range(300):  # the reader is busy
            await asyncio.sleep(0)
        assert len(pulled) <= 5
        rest = [item async for item in items]
    assert len(rest) == 199
