"""An attempt whose replica sends nothing, takes too long or ends too early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest

from deployments.errors import ReplicaStalledError, RequestTimeoutError
from deployments.requests.attempt import Attempt
from deployments.requests.attempt_stream import AttemptError
from deployments.requests.engine_client import EngineClient
from deployments.routing.cluster_view import ClusterView
from engine.errors import EngineDeadError
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import FakeEngines, client, output

REQUEST = EngineRequest("id", [1, 2, 3], SamplingParams())


class Pausing:
    """Responses that pause after ``outputs``, until ``go_on`` is set."""

    def __init__(self, outputs: list[EngineOutput]) -> None:
        self.outputs = outputs
        self.go_on = asyncio.Event()
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[EngineOutput]:
        for one in self.outputs:
            yield one
        await self.go_on.wait()
        yield output([9], "stop")

    def cancel(self) -> None:
        self.cancelled = True


class View(ClusterView):
    """A view in which every request is at r1, whose stall timeout is extended ``allowances`` times."""

    def __init__(self, allowances: int = 0) -> None:
        super().__init__()
        self.allowances = allowances

    def replica_of(self, request_id: str) -> str:
        return "r1"

    def stall_allowance(self, request_id: str, stall_timeout_s: float) -> float:
        self.allowances -= 1
        return stall_timeout_s if self.allowances >= 0 else 0.0


async def _read(engines: EngineClient, deadline_s: float = 60.0) -> list[int]:
    deadline = asyncio.get_running_loop().time() + deadline_s
    tokens: list[int] = []
    with closing(engines.send(REQUEST, [7], avoid=[], deadline=deadline, attempt=Attempt())) as outputs:
        while True:
            one = await outputs.next()
            tokens += one.token_ids
            if one.finish_reason is not None:
                return tokens


def _paused(responses: Pausing, view: ClusterView, stall_timeout_s: float = 0.02) -> EngineClient:
    return EngineClient(lambda *_, **__: responses, view, stall_timeout_s=stall_timeout_s, request_timeout_s=60.0)


@pytest.mark.parametrize("outputs", [[], [output([5])]])
async def test_a_replica_that_sends_nothing_is_lost(outputs: list[EngineOutput]) -> None:
    responses = Pausing(outputs)
    with pytest.raises(AttemptError) as caught:
        await _read(_paused(responses, View()))
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert caught.value.replica == "r1"
    assert responses.cancelled


async def test_a_replica_with_a_queue_may_send_nothing() -> None:
    responses, view = Pausing([output([5])]), View(allowances=3)
    reading = asyncio.create_task(_read(_paused(responses, view)))
    while view.allowances > 1:
        await asyncio.sleep(0.005)
    responses.go_on.set()
    assert await reading == [5, 9]


async def test_every_output_restarts_the_stall_timeout() -> None:
    class Steady(Pausing):
        async def __aiter__(self) -> AsyncIterator[EngineOutput]:
            for one in self.outputs:
                await asyncio.sleep(0.03)
                yield one

    responses = Steady([*(output([token]) for token in range(4)), output([4], "stop")])
    assert await _read(_paused(responses, View(), stall_timeout_s=0.1)) == [0, 1, 2, 3, 4]


async def test_a_stall_is_noticed_after_outputs_that_moved_the_timer() -> None:
    class Slowing(Pausing):
        async def __aiter__(self) -> AsyncIterator[EngineOutput]:
            yield self.outputs[0]
            await asyncio.sleep(0.1)
            yield self.outputs[1]
            self.last = time.monotonic()
            await self.go_on.wait()

    responses = Slowing([output([1]), output([2])])
    with pytest.raises(AttemptError) as caught:
        await _read(_paused(responses, View(), stall_timeout_s=0.2))
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert time.monotonic() - responses.last >= 0.2


async def test_a_slow_reader_is_no_stall() -> None:
    """The clock runs while we wait for the replica, not while a client takes its time."""
    engines = client(FakeEngines([[output([5]), output([6], "stop")]]), View(), stall_timeout_s=0.01)
    with closing(engines.send(REQUEST, [], avoid=[], deadline=float("inf"), attempt=Attempt())) as outputs:
        for _ in range(2):
            await outputs.next()
            await asyncio.sleep(0.03)


async def test_the_deadline_ends_a_request_in_spite_of_allowances() -> None:
    responses = Pausing([output([5])])
    with pytest.raises(AttemptError) as caught:
        await _read(_paused(responses, View(allowances=10**6), stall_timeout_s=0.005), deadline_s=0.03)
    assert isinstance(caught.value.cause, RequestTimeoutError)
    assert responses.cancelled


async def test_a_client_that_disconnects_is_no_stall() -> None:
    responses = Pausing([])
    reading = asyncio.create_task(_read(_paused(responses, View(), stall_timeout_s=30.0)))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert responses.cancelled


async def test_a_timeout_that_the_replica_raised_is_no_stall() -> None:
    engines = client(FakeEngines([[TimeoutError("inside")]]), View())
    with pytest.raises(AttemptError, match="inside") as caught:
        await _read(engines)
    assert isinstance(caught.value.cause, TimeoutError)


async def test_a_stream_that_ends_early_is_an_error() -> None:
    with pytest.raises(AttemptError) as caught:
        await _read(client(FakeEngines([[output([5])]]), View()))
    assert isinstance(caught.value.cause, EngineDeadError)


async def test_the_view_has_a_requests_replica_until_it_ends() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    seen: list[Any] = []

    class Placing(FakeEngines):
        def dispatch(self, request: EngineRequest, **kwargs: Any) -> Any:
            seen.append(view.num_unassigned)
            view.dispatch(request.request_id, "r1", kwargs["block_hashes"], 3)
            view.dispatch(request.request_id, "r2", kwargs["block_hashes"], 3)  # r1 rejected it
            seen.append(view.replica_of(request.request_id))
            return super().dispatch(request, **kwargs)

    assert await _read(client(Placing([[output([5], "stop")]]), view)) == [5]
    assert seen == [1, "r2"]
    assert (view.replica_of("id"), view.num_unassigned, view.queued()) == ("", 0, (0, 0))
    view.dispatch("id", "r1", [7], 3)  # the router was late
    assert view.queued() == (0, 0)


async def test_the_stall_timeout_starts_when_a_replica_is_chosen() -> None:
    """The time in which an idle server starts its first engine is no stall of that engine."""
    responses, view = Pausing([]), ClusterView()
    view.set_replicas({"r1": {}})
    reading = asyncio.create_task(_read(_paused(responses, view, stall_timeout_s=0.2)))
    await asyncio.sleep(0.15)
    view.dispatch("id", "r1", [7], 3)
    placed = time.monotonic()
    with pytest.raises(AttemptError) as caught:
        await reading
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert time.monotonic() - placed >= 0.2


async def test_a_call_that_fails_leaves_no_request_in_the_view() -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the router is gone")

    view = ClusterView()
    with pytest.raises(AttemptError, match="the router is gone"):
        await _read(EngineClient(fail, view, stall_timeout_s=30.0, request_timeout_s=60.0))
    assert view.queued() == (0, 0)
