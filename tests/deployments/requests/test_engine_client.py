"""An attempt whose replica sends nothing, takes too long or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from deployments.errors import ReplicaStalledError, RequestTimeoutError
from deployments.requests import stall_watch
from deployments.requests.attempt import Attempt
from deployments.requests.attempt_stream import AttemptError
from deployments.requests.engine_client import EngineClient
from deployments.routing.cluster_view import ClusterView
from deployments.transport.request_channel.stream import ReplicaStream
from engine.errors import EngineDeadError
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import FakeEngines, client, output
from tests.virtual_clock import now, on_virtual_clock

REQUEST = EngineRequest("id", [1, 2, 3], SamplingParams())


class Held:
    """Engines whose streams get their outputs from the test."""

    def __init__(self, *outputs: EngineOutput) -> None:
        self.outputs = outputs
        self.stream = ReplicaStream("")
        self.cancelled: list[ReplicaStream] = []

    def send(self, request: EngineRequest, *, block_hashes: Sequence[int], avoid: Sequence[str]) -> ReplicaStream:
        self.stream = ReplicaStream(request.request_id)
        for one in self.outputs:
            self.stream.put(one)
        return self.stream

    def cancel(self, stream: ReplicaStream) -> None:
        self.cancelled.append(stream)


class View(ClusterView):
    """A view in which the request is at r1, whose stall timeout is extended ``allowances`` times."""

    def __init__(self, allowances: int = 0) -> None:
        super().__init__()
        self.allowances = allowances

    def replica_of(self, request_id: str) -> str:
        return "r1" if request_id == REQUEST.request_id else ""

    def stall_allowance(self, request_id: str, stall_timeout_s: float) -> float:
        self.allowances -= 1
        return stall_timeout_s if self.allowances >= 0 else 0.0


async def _read(engines: EngineClient, deadline_s: float = 60.0) -> list[int]:
    deadline = now() + deadline_s
    tokens: list[int] = []
    with closing(engines.send(REQUEST, [7], avoid=[], deadline=deadline, attempt=Attempt())) as outputs:
        while True:
            if (one := await outputs.next()) is None:
                continue
            tokens += one.token_ids
            if one.finish_reason is not None:
                return tokens


def _client(engines: Held, view: ClusterView, stall_timeout_s: float = 0.02) -> EngineClient:
    return EngineClient(engines, view, stall_timeout_s=stall_timeout_s, request_timeout_s=60.0)


@pytest.mark.parametrize("outputs", [[], [output([5])]])
@on_virtual_clock
async def test_a_replica_that_sends_nothing_is_lost(outputs: list[EngineOutput]) -> None:
    engines = Held(*outputs)
    with pytest.raises(AttemptError) as caught:
        await _read(_client(engines, View()))
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert caught.value.replica == "r1"
    assert engines.cancelled == [engines.stream]


@on_virtual_clock
async def test_a_replica_with_a_queue_may_send_nothing() -> None:
    engines, view = Held(output([5])), View(allowances=3)
    reading = asyncio.create_task(_read(_client(engines, view)))
    while view.allowances > 1:
        await asyncio.sleep(0.005)
    engines.stream.put(output([9], "stop"))
    assert await reading == [5, 9]


@pytest.mark.parametrize(("params", "streams"), [({}, True), ({"temperature": 0.0, "beam_width": 2}, False)])
async def test_the_view_knows_whose_tokens_come_together(
    params: dict[str, Any], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    view = View()
    monkeypatch.setattr(view, "begin", lambda request_id, *, streams: begun.append(streams))
    request = EngineRequest("id", [1], SamplingParams(**params))
    with closing(_client(Held(), view).send(request, [], avoid=[], deadline=1e9, attempt=Attempt())):
        assert begun == [streams]


@on_virtual_clock
async def test_every_output_restarts_the_stall_timeout() -> None:
    engines = Held()
    reading = asyncio.create_task(_read(_client(engines, View(), stall_timeout_s=20), deadline_s=200))
    for token in range(6):
        await asyncio.sleep(19)
        engines.stream.put_token(token)
    engines.stream.put(output([6], "stop"))
    assert await reading == [0, 1, 2, 3, 4, 5, 6]


@on_virtual_clock
async def test_a_stall_is_noticed_after_outputs_and_not_too_early() -> None:
    engines = Held(output([1]))
    reading = asyncio.create_task(_read(_client(engines, View(), stall_timeout_s=20)))
    await asyncio.sleep(10)
    engines.stream.put_token(2)
    with pytest.raises(AttemptError) as caught:
        await reading
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert 30 <= now() <= 30 + 2 * stall_watch.MAX_INTERVAL_S


@on_virtual_clock
async def test_nothing_is_returned_now_and_then_while_nothing_comes() -> None:
    """Which does not restart the stall timeout."""
    sender, got = _client(Held(output([1])), View(), stall_timeout_s=6.5), []

    async def read() -> None:
        with closing(sender.send(REQUEST, [], avoid=[], deadline=float("inf"), attempt=Attempt())) as outputs:
            while True:
                got.append(await outputs.next())

    with pytest.raises(AttemptError) as caught:
        await read()
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert 6.5 <= now() < 7.5
    first, *others = got
    assert first is not None
    assert others == [None] * 6, "once a second"


@on_virtual_clock
async def test_a_slow_reader_is_not_a_stall() -> None:
    """The clock runs while we wait for the replica, not while a client takes its time."""
    engines = client(FakeEngines([[output([5]), output([6], "stop")]]), View(), stall_timeout_s=10)
    with closing(engines.send(REQUEST, [], avoid=[], deadline=float("inf"), attempt=Attempt())) as outputs:
        for _ in range(2):
            await outputs.next()
            await asyncio.sleep(30)


async def test_what_has_arrived_meanwhile_is_one_output() -> None:
    engines = Held(output([5]))
    attempt = Attempt()
    sent = _client(engines, View(), 30.0).send(REQUEST, [], avoid=[], deadline=float("inf"), attempt=attempt)
    with closing(sent) as outputs:
        for token in (6, 7):
            engines.stream.put_token(token)
        engines.stream.put(output([8], "stop"))
        engines.stream.fail(EngineDeadError("too late"))
        taken = await outputs.next()
        assert taken is not None
        assert taken.token_ids == [5, 6, 7, 8]
    assert attempt.num_tokens == 4


@on_virtual_clock
async def test_the_deadline_ends_a_request_in_spite_of_allowances() -> None:
    engines = Held(output([5]))
    with pytest.raises(AttemptError) as caught:
        await _read(_client(engines, View(allowances=10**6), stall_timeout_s=5), deadline_s=30)
    assert isinstance(caught.value.cause, RequestTimeoutError)
    assert engines.cancelled


@on_virtual_clock
async def test_a_client_that_disconnects_is_not_a_stall() -> None:
    engines = Held()
    sender = _client(engines, View(), stall_timeout_s=30.0)
    reading = asyncio.create_task(_read(sender))
    await asyncio.sleep(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert engines.cancelled
    assert not sender._watch._watched


@on_virtual_clock
async def test_one_timer_watches_all_streams_and_stops_with_the_last() -> None:
    engines, view = Held(), View()
    sender = _client(engines, view, stall_timeout_s=20)
    readers = [asyncio.create_task(_read(sender)) for _ in range(50)]
    await asyncio.sleep(1)
    timers = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
    assert len(timers) == 1
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(result, AttemptError) for result in results)
    await asyncio.sleep(1)
    assert sender._watch._timer is None


async def test_an_error_of_the_replica_is_the_cause() -> None:
    engines = client(FakeEngines([[TimeoutError("inside")]]), View())
    with pytest.raises(AttemptError, match="inside") as caught:
        await _read(engines)
    assert isinstance(caught.value.cause, TimeoutError)


async def test_the_view_has_a_requests_replica_until_it_ends() -> None:
    view = ClusterView()
    view.set_replicas({"r1": {}, "r2": {}})
    seen: list[Any] = []

    class Choosing(FakeEngines):
        def send(self, request: EngineRequest, **options: Any) -> Any:
            seen.append(view.num_unassigned)
            view.dispatch(request.request_id, "r1", options["block_hashes"], 3)
            seen.append(view.num_unassigned)
            view.unassign(request.request_id)  # r1 has returned it
            seen.append(view.num_unassigned)
            view.dispatch(request.request_id, "r2", options["block_hashes"], 3)
            seen.append(view.replica_of(request.request_id))
            return super().send(request, **options)

    assert await _read(client(Choosing([[output([5], "stop")]]), view)) == [5]
    assert seen == [1, 0, 1, "r2"]
    assert (view.replica_of("id"), view.num_unassigned, view.queued()) == ("", 0, (0, 0))
    view.dispatch("id", "r1", [7], 3)  # the dispatcher was late
    assert view.queued() == (0, 0)


@on_virtual_clock
async def test_the_stall_timeout_starts_when_a_replica_is_chosen() -> None:
    """The time in which an idle server starts its first engine is not a stall of that engine."""
    engines, view = Held(), ClusterView()
    view.set_replicas({"r1": {}})
    reading = asyncio.create_task(_read(_client(engines, view, stall_timeout_s=20)))
    await asyncio.sleep(15)
    view.dispatch("id", "r1", [7], 3)
    with pytest.raises(AttemptError) as caught:
        await reading
    assert isinstance(caught.value.cause, ReplicaStalledError)
    assert now() >= 35


async def test_a_request_that_cannot_be_sent_leaves_nothing_in_the_view() -> None:
    class Broken(Held):
        def send(self, *_: Any, **__: Any) -> ReplicaStream:
            raise RuntimeError("a bug")

    view = ClusterView()
    with pytest.raises(RuntimeError, match="a bug"):
        await _read(_client(Broken(), view))
    assert view.queued() == (0, 0)
