"""A dispatch whose replica sends nothing, takes too long or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deployments.errors import ReplicaStalledError, RequestTimeoutError
from deployments.requests import stall_watch
from deployments.requests.stall_watch import StallWatch
from deployments.routing.cluster_view import ClusterView
from deployments.routing.policy import Decision
from deployments.transport.request_channel.dispatch import Dispatch
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import output
from tests.virtual_clock import now, on_virtual_clock

REQUEST = EngineRequest("id", [1, 2, 3], SamplingParams())


class View(ClusterView):
    """A view that extends the stall timeout ``allowances`` times."""

    def __init__(self, allowances: int = 0) -> None:
        super().__init__()
        self.allowances = allowances

    def stall_allowance(self, dispatch: Dispatch, stall_timeout_s: float) -> float:
        self.allowances -= 1
        return stall_timeout_s if self.allowances >= 0 else 0.0


def _dispatch(*outputs: EngineOutput, deadline_s: float = 60.0) -> Dispatch:
    """Return a request at r1 that has sent these outputs."""
    dispatch = Dispatch(REQUEST, [7], deadline=now() + deadline_s, replica="r1")
    for arrived in outputs:
        dispatch.put(arrived)
    return dispatch


def _watch(view: ClusterView, stall_timeout_s: float = 20.0) -> StallWatch:
    return StallWatch(view, stall_timeout_s=stall_timeout_s)


@contextmanager
def _watched(watch: StallWatch, dispatch: Dispatch) -> Iterator[None]:
    watch.add(dispatch)
    try:
        yield
    finally:
        watch.remove(dispatch)


async def _read(watch: StallWatch, dispatch: Dispatch) -> list[int]:
    tokens: list[int] = []
    with _watched(watch, dispatch):
        while True:
            if (taken := await dispatch.next()) is None:
                continue
            tokens += taken.token_ids
            if taken.finish_reason is not None:
                return tokens


@pytest.mark.parametrize("outputs", [[], [output([5])]])
@on_virtual_clock
async def test_a_replica_that_sends_nothing_is_lost(outputs: list[EngineOutput]) -> None:
    with pytest.raises(ReplicaStalledError) as caught:
        await _read(_watch(View()), _dispatch(*outputs))
    assert caught.value.replica == "r1"


@on_virtual_clock
async def test_a_replica_with_a_queue_may_send_nothing() -> None:
    dispatch, view = _dispatch(output([5])), View(allowances=3)
    reading = asyncio.create_task(_read(_watch(view, stall_timeout_s=0.02), dispatch))
    while view.allowances > 1:
        await asyncio.sleep(0.005)
    dispatch.put(output([9], "stop"))
    assert await reading == [5, 9]


@on_virtual_clock
async def test_every_output_restarts_the_stall_timeout() -> None:
    dispatch = _dispatch(deadline_s=200)
    reading = asyncio.create_task(_read(_watch(View()), dispatch))
    for token in range(6):
        await asyncio.sleep(19)
        dispatch.put_token(token)
    dispatch.put(output([6], "stop"))
    assert await reading == [0, 1, 2, 3, 4, 5, 6]


@on_virtual_clock
async def test_a_stall_is_noticed_after_outputs_and_not_too_early() -> None:
    dispatch = _dispatch(output([1]))
    reading = asyncio.create_task(_read(_watch(View()), dispatch))
    await asyncio.sleep(10)
    dispatch.put_token(2)
    with pytest.raises(ReplicaStalledError):
        await reading
    assert 30 <= now() <= 30 + 2 * stall_watch.MAX_INTERVAL_S


@on_virtual_clock
async def test_nothing_is_returned_now_and_then_while_nothing_comes() -> None:
    """Which does not restart the stall timeout."""
    dispatch, taken = _dispatch(output([1])), []

    async def read() -> None:
        with _watched(_watch(View(), stall_timeout_s=6.5), dispatch):
            while True:
                taken.append(await dispatch.next())

    with pytest.raises(ReplicaStalledError):
        await read()
    assert 6.5 <= now() < 7.5
    first, *others = taken
    assert first is not None
    assert others == [None] * 6, "once a second"


@on_virtual_clock
async def test_a_slow_reader_is_not_a_stall() -> None:
    """The clock runs while we wait for the replica, not while a client takes its time."""
    dispatch = _dispatch()
    with _watched(_watch(View(), stall_timeout_s=10), dispatch):
        for token in range(3):
            dispatch.put_token(token)
            taken = await dispatch.next()
            assert taken is not None
            assert taken.token_ids == [token]
            await asyncio.sleep(30)


@on_virtual_clock
async def test_the_deadline_ends_a_request_in_spite_of_allowances() -> None:
    with pytest.raises(RequestTimeoutError):
        await _read(_watch(View(allowances=10**6), stall_timeout_s=5), _dispatch(output([5]), deadline_s=30))
    assert 30 <= now() < 31


@on_virtual_clock
async def test_a_client_that_disconnects_is_not_a_stall() -> None:
    watch, dispatch = _watch(View()), _dispatch()
    reading = asyncio.create_task(_read(watch, dispatch))
    await asyncio.sleep(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert dispatch.wait_in_progress is None
    assert not watch._watched


@on_virtual_clock
async def test_one_timer_watches_all_streams_and_stops_with_the_last() -> None:
    watch = _watch(View())
    readers = [asyncio.create_task(_read(watch, _dispatch())) for _ in range(50)]
    await asyncio.sleep(1)
    timers = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
    assert len(timers) == 1
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(result, ReplicaStalledError) for result in results)
    await asyncio.sleep(1)
    assert watch._timer is None


@on_virtual_clock
async def test_the_stall_timeout_starts_when_a_replica_is_chosen() -> None:
    """The time in which an idle server starts its first engine is not a stall of that engine."""
    view = ClusterView()
    view.set_replicas({"r1": {}})
    dispatch = _dispatch()
    dispatch.replica = ""
    reading = asyncio.create_task(_read(_watch(view), dispatch))
    await asyncio.sleep(15)
    dispatch.replica = "r1"
    view.sent(dispatch, Decision("r1", "cold", 0, 0))
    with pytest.raises(ReplicaStalledError):
        await reading
    assert now() >= 35
