"""What a request does when its replica falls silent, takes too long or ends too early."""

from __future__ import annotations

import asyncio
import threading
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


class Silent:
    """Responses that stop coming after the first ``outputs``, for ever or until ``go_on`` is set."""

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
    """A view in which every request is at r1, which may be silent as long as ``excuses`` last."""

    def __init__(self, excuses: int = 0) -> None:
        super().__init__()
        self.excuses = excuses

    def replica_of(self, request_id: str) -> str:
        return "r1"

    def stall_allowance(self, request_id: str, stall_timeout_s: float) -> float:
        self.excuses -= 1
        return stall_timeout_s if self.excuses >= 0 else 0.0


async def _read(engines: EngineClient, deadline_s: float = 60.0) -> list[int]:
    deadline = asyncio.get_running_loop().time() + deadline_s
    tokens: list[int] = []
    with closing(engines.send(REQUEST, [7], avoid=[], deadline=deadline, attempt=Attempt())) as outputs:
        while True:
            one = await outputs.next()
            tokens += one.token_ids
            if one.finish_reason is not None:
                return tokens


def _silent(responses: Silent, view: ClusterView, stall_timeout_s: float = 0.02) -> EngineClient:
    return EngineClient(lambda *_, **__: responses, view, stall_timeout_s=stall_timeout_s, request_timeout_s=60.0)


@pytest.mark.parametrize("outputs", [[], [output([5])]])
async def test_a_silent_replica_is_lost(outputs: list[EngineOutput]) -> None:
    responses = Silent(outputs)
    with pytest.raises(AttemptError) as caught:
        await _read(_silent(responses, View()))
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert caught.value.replica == "r1"
    assert responses.cancelled


async def test_a_replica_with_a_queue_may_be_silent() -> None:
    responses, view = Silent([output([5])]), View(excuses=3)
    reading = asyncio.create_task(_read(_silent(responses, view)))
    while view.excuses > 1:
        await asyncio.sleep(0.005)
    responses.go_on.set()
    assert await reading == [5, 9]


async def test_who_reads_slowly_is_not_stalled() -> None:
    """The clock runs while we wait for the replica, not while a client takes its time."""
    engines = client(FakeEngines([[output([5]), output([6], "stop")]]), View(), stall_timeout_s=0.01)
    with closing(engines.send(REQUEST, [], avoid=[], deadline=float("inf"), attempt=Attempt())) as outputs:
        for _ in range(2):
            await outputs.next()
            await asyncio.sleep(0.03)


async def test_the_deadline_ends_a_request_whatever_excuses_there_are() -> None:
    responses = Silent([output([5])])
    with pytest.raises(AttemptError) as caught:
        await _read(_silent(responses, View(excuses=10**6), stall_timeout_s=0.005), deadline_s=0.03)
    assert isinstance(caught.value.cause, RequestTimeoutError)
    assert responses.cancelled


async def test_a_client_that_goes_away_is_no_stall() -> None:
    responses = Silent([])
    reading = asyncio.create_task(_read(_silent(responses, View(), stall_timeout_s=30.0)))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert responses.cancelled


async def test_a_timeout_that_the_replica_raised_stays_what_it_is() -> None:
    engines = client(FakeEngines([[TimeoutError("inside")]]), View())
    with pytest.raises(AttemptError, match="inside") as caught:
        await _read(engines)
    assert isinstance(caught.value.cause, TimeoutError)


async def test_a_stream_that_ends_early_is_an_error() -> None:
    with pytest.raises(AttemptError) as caught:
        await _read(client(FakeEngines([[output([5])]]), View()))
    assert isinstance(caught.value.cause, EngineDeadError)


async def test_where_a_request_is_is_known_until_it_ends() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    seen: list[Any] = []

    class Placing(FakeEngines):
        def dispatch(self, request: EngineRequest, **kwargs: Any) -> Any:
            seen.append(view.num_unassigned)
            view.dispatch(request.request_id, "r1", kwargs["block_hashes"], 3)
            view.dispatch(request.request_id, "r2", kwargs["block_hashes"], 3)  # r1 did not take it
            seen.append(view.replica_of(request.request_id))
            return super().dispatch(request, **kwargs)

    assert await _read(client(Placing([[output([5], "stop")]]), view)) == [5]
    assert seen == [1, "r2"]
    assert (view.replica_of("id"), view.num_unassigned, view.queued()) == ("", 0, (0, 0))
    view.dispatch("id", "r1", [7], 3)  # the router was late
    assert view.queued() == (0, 0)


async def test_the_clock_of_a_stall_starts_when_there_is_a_replica() -> None:
    """Who waited for the first engine of an idle server has not waited for that engine."""
    responses, view = Silent([]), ClusterView()
    view.set_replicas({"r1": {}})
    reading = asyncio.create_task(_read(_silent(responses, view, stall_timeout_s=0.2)))
    await asyncio.sleep(0.15)
    view.dispatch("id", "r1", [7], 3)
    placed = time.monotonic()
    with pytest.raises(AttemptError) as caught:
        await reading
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert time.monotonic() - placed >= 0.2


async def test_a_call_that_cannot_be_made_leaves_no_request_behind() -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the router is gone")

    view = ClusterView()
    with pytest.raises(AttemptError, match="the router is gone"):
        await _read(EngineClient(fail, view, stall_timeout_s=30.0, request_timeout_s=60.0))
    assert view.queued() == (0, 0)


def test_a_request_that_ends_while_it_is_placed_is_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router may run in a thread of its own."""
    view = ClusterView()
    view.set_replicas({"r1": {}})
    dispatched = view.routing.dispatched
    ending = threading.Thread(target=view.end, args=("id",))

    def end_meanwhile(*args: Any, **kwargs: Any) -> None:
        ending.start()
        ending.join(0.1)
        dispatched(*args, **kwargs)

    monkeypatch.setattr(view.routing, "dispatched", end_meanwhile)
    view.begin("id")
    view.dispatch("id", "r1", [7], 3)
    ending.join()
    assert view.queued() == (0, 0)


def test_a_replica_that_drains_is_listened_to_until_our_requests_there_have_ended() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    for name in ("a", "b"):
        view.begin(name)
        view.dispatch(name, "r1", [1], 20)
    view.set_replicas({"r2": {}})
    assert view.replicas == {"r2"}
    assert view.routing.replicas == {"r1", "r2"}
    view.end("a")
    assert view.routing.replicas == {"r1", "r2"}
    view.end("b")
    assert view.routing.replicas == {"r2"}
    view.set_replicas({})
    assert view.routing.replicas == frozenset()
