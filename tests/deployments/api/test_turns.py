"""Turns: how many callers go on in one turn of the event loop, and in which order."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from deployments.api.turns import Turns
from tests.waiting import HANG_S


async def _turn_counter(turns: list[int]) -> None:
    while True:
        await asyncio.sleep(0)
        turns[0] += 1


@pytest.mark.parametrize("count", [1, 3, 4, 100])
async def test_so_many_go_on_in_a_turn_and_in_their_order(count: int) -> None:
    turns, gate, went_on = [0], Turns(3), list[tuple[int, int]]()

    async def caller(number: int) -> None:
        await gate.wait()
        went_on.append((turns[0], number))

    counting = asyncio.create_task(_turn_counter(turns))
    await asyncio.gather(*map(caller, range(count)))
    counting.cancel()
    assert [number for _, number in went_on] == list(range(count))
    assert max(Counter(turn for turn, _ in went_on).values()) <= 3
    assert went_on[-1][0] - went_on[0][0] <= count / 3 + 2, "a turn was left out"


async def test_clients_take_turns() -> None:
    gate, went_on = Turns(2), list[str]()

    async def caller(client: str, number: int) -> None:
        await gate.wait(client)
        went_on.append(f"{client}{number}")

    sent = [*(("a", number) for number in range(6)), *(("b", number) for number in range(2)), ("c", 0)]
    await asyncio.gather(*(caller(*arguments) for arguments in sent))
    assert went_on == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "a4", "a5"]
    await asyncio.wait_for(gate.wait("d"), HANG_S)


async def test_an_idle_gate_asks_for_no_turns() -> None:
    gate, loop = Turns(2), asyncio.get_running_loop()
    for _ in range(5):
        await gate.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not loop._ready  # type: ignore[attr-defined]


async def test_a_caller_that_is_cancelled_takes_no_turn() -> None:
    gate, went_on = Turns(1), list[int]()

    async def caller(number: int) -> None:
        await gate.wait()
        went_on.append(number)

    tasks = [asyncio.create_task(caller(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert went_on == [0, 3]
    await asyncio.wait_for(gate.wait(), HANG_S)
