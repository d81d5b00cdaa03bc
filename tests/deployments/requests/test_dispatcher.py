"""Which replica a request goes to, and what waits; with real channels to engines that compute nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from deployments.errors import RequestTimeoutError
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.generation import Generation
from deployments.requests.prompt import Prompt
from deployments.routing.cluster_view import ClusterView
from deployments.transport.pages.address import PageAddress
from deployments.transport.request_channel.dispatch import Dispatch
from engine.errors import EngineDeadError, OverloadedError, RequestError
from engine.observability.load import SourceRate
from engine.request import EngineRequest, KVSource
from engine.sampling_params import SamplingParams
from tests.deployments.fakes import IDLE, FakeText
from tests.deployments.transport.request_channel.peers import Peers, Replica, tokens_of
from tests.engine.async_streams import Gate
from tests.waiting import HANG_S, until_in_loop


class Front:
    """A dispatcher with its view, and the replicas that Serve would list."""

    def __init__(self, peers: Peers, max_requests: int = 100) -> None:
        self.peers = peers
        self.view = ClusterView(clock=lambda: 0.0)  # no load report expires, however slow the machine is
        self.replicas: dict[str, Replica] = {}
        self.num_wakes = 0
        self.woken = asyncio.Event()
        self.dispatcher = Dispatcher(
            self.view, self._wake, max_requests=max_requests, stall_timeout_s=HANG_S, request_timeout_s=HANG_S
        )
        self.dispatcher.start()
        self._num_sent = 0

    async def _wake(self) -> None:
        self.num_wakes += 1
        await self.woken.wait()

    async def add(self, *names: str, **options: Any) -> None:
        """Start replicas and wait until they take requests."""
        for name in names:
            self.replicas[name] = self.peers.replica(**options)
        self.list_replicas(*self.replicas)
        links = self.dispatcher._links
        assert links is not None
        await until_in_loop(lambda: set(links.ready) >= set(names))
        for name in names:
            self.view.routing.report(name, IDLE, now=0.0)

    def list_replicas(self, *names: str) -> None:
        self.view.set_replicas(
            {name: {"block_size": 4, **self.replicas[name].server.address.metadata} for name in names}
        )

    def send(
        self, hashes: list[int] | None = None, *, avoid: list[str] | None = None, length: int = 5, **params: Any
    ) -> Dispatch:
        self._num_sent += 1
        prompt = [self._num_sent % 50] * (4 * len(hashes or ()) + 1)
        request = EngineRequest(f"r{self._num_sent}", prompt, SamplingParams(max_tokens=length, **params))
        return self.dispatcher.send(request, hashes or [], avoid=avoid or [], deadline=inf)


@pytest.fixture
async def front(peers: Peers) -> AsyncIterator[Front]:
    opened = Front(peers)
    yield opened
    opened.dispatcher.close()


async def test_a_prefix_goes_to_the_replica_that_caches_it(front: Front) -> None:
    await front.add("a", "b", "c")
    front.view.routing.stored("b", [1, 2, 3])
    for tail in range(5):
        stream = front.send([1, 2, 3, 100 + tail])
        assert stream.replica == "b"
        assert len(await tokens_of(stream)) == 5
        front.dispatcher.end(stream)
    assert [routed.replica for routed in front.view.recently_routed()] == ["b"] * 5
    assert front.dispatcher.queued() == (0, 0)
    assert not front.dispatcher._watch._watched


async def test_a_request_counts_before_its_kv_events_arrive(front: Front) -> None:
    await front.add("a", "b", "c")
    long = list(range(40))
    first = front.send(long)
    assert front.send(long).replica == first.replica
    assert front.send([7]).replica != first.replica  # it would queue after a long prompt
    assert front.dispatcher.queued()[0] == 3


async def test_requests_spread_until_they_end(front: Front) -> None:
    await front.add("a", "b", "c")
    streams = [front.send([10 + number]) for number in range(30)]
    where = Counter(stream.replica for stream in streams)
    assert sorted(where) == ["a", "b", "c"]
    assert max(where.values()) <= 1.25 * 10 + 1
    for stream in streams:
        assert len(await tokens_of(stream)) == 5
        front.dispatcher.end(stream)
    assert front.dispatcher.queued() == (0, 0)
    assert not front.dispatcher._watch._watched


async def test_avoided_replicas_come_last(front: Front) -> None:
    await front.add("a", "b")
    front.view.routing.stored("a", [1])
    assert front.send([1], avoid=["a"]).replica == "b"
    assert front.send([1], avoid=["a", "b"]).replica in "ab"


async def test_the_view_lists_recently_routed_requests(front: Front) -> None:
    await front.add("a", "b")
    front.view.routing.stored("b", [1, 2])
    front.send([1, 2, 3])
    front.send([1, 2, 3], avoid=["b"])
    first, second = front.view.recently_routed()
    assert (first.replica, first.outcome) == ("b", "hit")
    assert (first.prompt_tokens, first.predicted_tokens, first.best_tokens) == (13, 8, 8)
    assert (second.outcome, second.predicted_tokens, second.replica) == ("retry", 0, "a")


async def test_the_request_names_the_source_that_was_chosen_and_a_retry_forgets_it(front: Front) -> None:
    await front.add("a", "b")
    pages = {name: PageAddress(f"tcp://{name}:1", f"secret of {name}") for name in "ab"}
    described = {name: {"block_size": 4, **front.replicas[name].server.address.metadata} for name in "ab"}
    front.view.set_replicas({name: described[name] | pages[name].metadata for name in "ab"})
    front.view.routing.replaced("a", [1, 2])
    measured = SourceRate("tcp://a:1", 0.0, 1e6)
    busy = replace(IDLE, prefill_tokens_per_s=100.0, queued_prefill_tokens=1_000)
    front.view.routing.report("a", busy, now=0.0)
    front.view.routing.report("b", replace(busy, queued_prefill_tokens=0, source_rates=(measured,)), now=0.0)
    dispatch = front.send([1, 2, 3])
    assert dispatch.replica == "b"
    assert dispatch.request.kv_source == KVSource("tcp://a:1", "secret of a", 8)
    assert front.view.recently_routed()[0].source == "a"
    assert len(await tokens_of(dispatch)) == 5
    again = Dispatch(dispatch.request, [1, 2, 3], avoid=["a"])
    assert front.dispatcher._try_send(again)
    assert again.request.kv_source is None


async def test_a_replica_that_is_full_here_is_not_chosen_nor_counted_as_a_hit(peers: Peers) -> None:
    front = Front(peers, max_requests=1)
    await front.add("a", "b")
    gates = [Gate(replica.runner) for replica in front.replicas.values()]
    front.view.routing.stored("b", [1])
    assert front.send([1]).replica == "b"
    assert front.send([1]).replica == "a"
    routed = front.view.recently_routed()[-1]
    assert (routed.outcome, routed.predicted_tokens, routed.best_tokens) == ("balanced", 0, 4)
    late = front.send([1])
    assert late.replica == ""
    assert len(front.dispatcher._waiting) == 1
    for gate in gates:
        gate.opened.set()
    assert len(await tokens_of(late)) == 5
    assert front.num_wakes == 0
    front.dispatcher.close()


async def test_waiting_requests_are_sent_in_order(peers: Peers) -> None:
    front = Front(peers, max_requests=1)
    await front.add("a")
    streams = [front.send([number]) for number in range(10)]
    ended: list[int] = []

    async def read(number: int) -> None:
        await tokens_of(streams[number])
        ended.append(number)
        front.dispatcher.end(streams[number])

    front.dispatcher.end(streams.pop(5))
    await asyncio.gather(*(read(number) for number in range(9)))
    assert ended == list(range(9))
    assert not front.dispatcher._waiting
    front.dispatcher.close()


async def test_a_replica_that_is_full_of_others_requests_returns_ours(front: Front) -> None:
    await front.add("a", max_requests=3)
    other = Front(front.peers)
    other.replicas = front.replicas
    other.list_replicas("a")
    links = other.dispatcher._links
    assert links is not None
    await until_in_loop(lambda: links.ready)
    streams = [(front, other)[number % 2].send(length=30) for number in range(40)]
    for number, stream in enumerate(streams):
        assert len(await tokens_of(stream)) == 30
        (front, other)[number % 2].dispatcher.end(stream)
    assert front.dispatcher.queued() == other.dispatcher.queued() == (0, 0)
    other.dispatcher.close()


async def test_a_request_that_its_replica_has_returned_may_be_cancelled_while_it_waits(front: Front) -> None:
    await front.add("a")
    stream = front.send()
    front.dispatcher._take_back(stream, OverloadedError("full"))
    assert len(front.dispatcher._waiting) == 1
    assert list(front.dispatcher._waiting) == [stream]
    front.dispatcher.end(stream)
    assert not front.dispatcher._waiting
    assert front.dispatcher.queued() == (0, 0)


async def test_a_prompt_that_was_returned_and_sent_again_is_used_once(front: Front) -> None:
    await front.add("a", "b")
    stream = front.send([1])
    front.dispatcher._take_back(stream, OverloadedError("full"))
    await until_in_loop(lambda: stream.replica, "it is sent again")
    assert [dict(text.num_ends) for text in front.dispatcher._hot_texts._texts.values()] == [{1: 1}]
    front.dispatcher.end(stream)


async def test_a_draining_replica_hands_new_requests_to_another_unnoticed(front: Front) -> None:
    await front.add("a")
    gate = Gate(front.replicas["a"].runner)
    running = front.send(length=20)
    await running.wait()
    draining = asyncio.create_task(front.replicas["a"].server.drain())
    await asyncio.sleep(0)
    late = front.send(length=20)
    assert late.replica == "a"
    gate.opened.set()
    await front.add("b")
    front.list_replicas("b")
    assert len(await tokens_of(late)) == 20
    assert late.replica == "b"
    assert len(await tokens_of(running)) == 20
    await draining


async def test_without_a_replica_one_call_wakes_serve_and_the_requests_wait(front: Front) -> None:
    streams = [front.send() for _ in range(5)]
    await until_in_loop(lambda: front.num_wakes)
    assert len(front.dispatcher._waiting) == 5
    await front.add("a")
    front.woken.set()
    for stream in streams:
        assert len(await tokens_of(stream)) == 5
    await until_in_loop(lambda: front.dispatcher._waking is not None and front.dispatcher._waking.done())
    assert front.num_wakes == 1


async def test_a_request_whose_client_goes_while_it_waits_is_forgotten(front: Front) -> None:
    stream, other = front.send(), front.send()
    front.dispatcher.end(stream)
    await front.add("a")
    assert len(await tokens_of(other)) == 5
    assert stream.replica == ""
    assert front.dispatcher._watch._watched == {other}


async def test_a_request_at_its_deadline_frees_its_blocks(front: Front) -> None:
    """The engine is in the middle of the answer, and another request of the batch runs to its end."""
    await front.add("a")
    replica = front.replicas["a"]
    gate = Gate(replica.runner)
    request, text = EngineRequest("late", [1], SamplingParams(max_tokens=200)), FakeText()
    generation = Generation(front.dispatcher, request, Prompt(request, []), text)  # type: ignore[arg-type]
    other = front.send(length=20)

    async def read() -> None:
        async for _ in generation.deltas():
            generation.attempts[-1].deadline = 0.0 if generation.token_ids else inf

    with pytest.raises(RequestTimeoutError):
        await read()
    assert replica.inner.block_manager.num_free_blocks < replica.inner.info.num_blocks
    gate.opened.set()
    assert len(await tokens_of(other)) == 20
    await until_in_loop(lambda: replica.is_idle)
    assert len(generation.token_ids) < 200


async def test_a_request_that_cannot_be_encoded_fails_alone(front: Front) -> None:
    await front.add("a")
    request = EngineRequest("bad", [2**40], SamplingParams())
    stream = front.dispatcher.send(request, [], avoid=[], deadline=inf)
    with pytest.raises(RequestError, match="cannot be sent"):
        stream.take()
    assert front.dispatcher.queued() == (0, 0)
    assert len(await tokens_of(front.send())) == 5


async def test_a_request_that_fails_while_it_is_sent_leaves_nothing(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.add("a")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(front.view, "choose", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        front.send()
    assert front.dispatcher.queued() == (0, 0)
    assert not front.dispatcher._watch._watched


async def test_a_dispatch_that_has_ended_ends_only_once(front: Front) -> None:
    await front.add("a")
    first, second = front.send(length=3), front.send(length=3)
    for _ in range(2):
        front.dispatcher.end(first)
    assert first.ended is not None
    assert front.dispatcher.queued()[0] == 1
    assert len(await tokens_of(second)) == 3


async def test_closing_fails_what_is_unfinished(front: Front) -> None:
    await front.add("a")
    gate = Gate(front.replicas["a"].runner)
    stream = front.send(length=100)
    await stream.wait()
    front.dispatcher.close()
    gate.opened.set()
    with pytest.raises(EngineDeadError):
        await tokens_of(stream)
