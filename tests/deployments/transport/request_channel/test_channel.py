"""A replica and its ingresses: requests, outputs, errors, aborts."""

from __future__ import annotations

import asyncio
import copy
from math import inf
from typing import Any

import pytest

from deployments.transport.request_channel import link as link_module
from deployments.transport.request_channel import server as server_module
from deployments.transport.request_channel.codec import decode_from_ingress
from deployments.transport.request_channel.dispatch import Dispatch
from deployments.transport.request_channel.errors import HandedOverError, ReplicaDrainingError, ReplicaFullError
from deployments.transport.request_channel.messages import Abort, Hello, Submit
from engine.errors import EngineDeadError, PromptTooLongError, RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.request import EngineRequest
from tests.deployments.transport.request_channel.peers import Peers, Replica, in_lockstep, outputs_of, tokens_of
from tests.engine.async_streams import Gate
from tests.waiting import until_in_loop


async def test_concurrent_streams_of_two_ingresses_each_get_their_own_tokens(peers: Peers) -> None:
    replica, first = await peers.pair()
    second = peers.ingress()
    await second.join(r1=replica.server.address)
    prompts = [[i, i + 1, i % 3] for i in range(40)]
    streams = [(first, second)[i % 2].submit(prompt, 12) for i, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*map(tokens_of, streams))
    assert answers == [replica.answer(prompt, 12) for prompt in prompts]
    await until_in_loop(lambda: replica.is_idle)
    assert not first.links["r1"].num_streams


async def test_an_answer_arrives_with_all_that_the_engine_says_of_it(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    stream = ingress.submit([1, 2, 3, 4, 5], 4, hashes=[7, 2**64 - 1], logprobs=2, prompt_logprobs=1)
    outputs = await outputs_of(stream)
    first, last = outputs[0], outputs[-1]
    assert [token for output in outputs for token in output.token_ids] == replica.answer([1, 2, 3, 4, 5], 4)
    assert (last.finish_reason, last.is_last, last.replica) == ("length", True, "r1")
    assert first.timing is not None
    assert last.timing is not None
    assert sum(len(output.logprobs or ()) for output in outputs) == 4
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 5
    assert replica.hashes == [[7, 2**64 - 1]]


async def test_messages_of_one_turn_go_as_one_in_their_order(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, ingress = await peers.pair()
    link = ingress.links["r1"]
    sent: list[list[Submit | Abort]] = []
    send = link._connection._requests.send

    def record(*frames: bytes) -> None:
        sent.append([message for message in map(decode_from_ingress, frames) if not isinstance(message, Hello)])
        send(*frames)

    monkeypatch.setattr(link._connection._requests, "send", record)
    streams = [ingress.submit([i], 5) for i in range(3)]
    link.cancel(streams[1])
    link._connection._say_hello(resend=True)
    assert not sent
    for i in (0, 2):
        assert await tokens_of(streams[i]) == replica.answer([i], 5)
    await until_in_loop(lambda: replica.is_idle)
    (together,) = filter(None, sent)
    assert [(type(message), message.number) for message in together] == [
        (Submit, 1),
        (Submit, 2),
        (Submit, 3),
        (Abort, 4),
    ]


async def test_a_slow_reader_gets_what_has_queued_in_one_output(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    stream = ingress.submit([1, 2], 30)
    await until_in_loop(lambda: replica.is_idle)
    await until_in_loop(lambda: not ingress.links["r1"].num_streams)
    (output,) = await outputs_of(stream)
    assert output.token_ids == replica.answer([1, 2], 30)
    assert output.timing is not None


async def test_a_cancelled_stream_frees_its_blocks_and_disturbs_no_other(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate = Gate(replica.runner)
    cancelled, other = ingress.submit([1], 200), ingress.submit([2], 20)
    await cancelled.wait()
    ingress.links["r1"].cancel(cancelled)
    ingress.links["r1"].cancel(cancelled)
    assert ingress.links["r1"].num_streams == 1
    gate.opened.set()
    assert await tokens_of(other) == replica.answer([2], 20)
    await until_in_loop(lambda: replica.is_idle)
    output = cancelled.take()
    assert output is not None
    assert not output.is_last


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "problem"),
    [
        ([1] * 2000, {}, PromptTooLongError, "has 2000 tokens"),
        ([999], {}, RequestError, "has the id 999"),
        ([1], {"structured_outputs": StructuredOutputsParams(regex="(")}, RequestError, "structured_outputs"),
    ],
)
async def test_an_invalid_request_fails_with_the_engines_error(
    peers: Peers, prompt: list[int], params: dict[str, Any], kind: type[Exception], problem: str
) -> None:
    replica, ingress = await peers.pair()
    stream = ingress.submit(prompt, 5, **params)
    with pytest.raises(kind, match=problem) as caught:
        await tokens_of(stream)
    assert type(caught.value) is kind
    await until_in_loop(lambda: replica.is_idle)


async def test_a_request_that_is_too_large_is_not_counted_as_a_stream(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_REQUEST_BYTES", 4000)
    replica, ingress = await peers.pair()
    link, gate = ingress.links["r1"], Gate(replica.runner)
    running = ingress.submit([1], 5)
    with pytest.raises(RequestError, match=r"makes a request of \d+ bytes, and 4000 are possible") as caught:
        ingress.submit([2] * 5000, 5)
    assert caught.value.param == "prompt"
    assert link.num_streams == 1
    gate.opened.set()
    for number, stream in enumerate((running, ingress.submit([2], 5)), 1):  # no number of a message is missing
        assert await tokens_of(stream) == replica.answer([number], 5)
    assert not link.num_streams


async def test_a_dispatch_that_was_sent_elsewhere_ends_no_stream_of_the_same_number(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate, running = Gate(replica.runner), ingress.submit([1], 5)
    ingress.links["r1"].cancel(copy.copy(running))
    gate.opened.set()
    assert await tokens_of(running) == replica.answer([1], 5)


async def test_a_full_replica_returns_the_request(peers: Peers) -> None:
    replica, ingress = await peers.pair(max_requests=2)
    gate = Gate(replica.runner)
    running = [ingress.submit([i], 20) for i in range(2)]
    late = ingress.submit([3], 20)
    connection = ingress.links["r1"]._connection
    await until_in_loop(lambda: replica.server._count.num_started == 2 and not len(connection._outbox))
    gate.opened.set()  # the step thread reports the refusal
    await until_in_loop(lambda: ingress.returned)
    assert ingress.returned[0][0] is late
    assert isinstance(ingress.returned[0][1], ReplicaFullError)
    for number, stream in enumerate(running):
        assert await tokens_of(stream) == replica.answer([number], 20)
    await until_in_loop(lambda: replica.is_idle)
    assert await tokens_of(ingress.submit([3], 20)) == replica.answer([3], 20)


async def test_a_draining_replica_finishes_its_streams_and_returns_new_requests(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate = Gate(replica.runner)
    running = ingress.submit([1], 50)
    await running.wait()
    draining = asyncio.create_task(replica.server.drain())
    ingress.links.set_replicas({})  # as Serve announces it
    late = ingress.submit([2], 20)
    gate.opened.set()
    await until_in_loop(lambda: ingress.returned)
    assert ingress.returned[0][0] is late
    assert isinstance(ingress.returned[0][1], ReplicaDrainingError)
    assert await tokens_of(running) == replica.answer([1], 50)
    await draining
    assert not len(ingress.links)
    await until_in_loop(lambda: not ingress.links._retired)


async def test_a_failed_engine_fails_the_streams_and_takes_no_more(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    gate = Gate(replica.runner)
    stream = ingress.submit([1], 50)
    await stream.wait()

    def fail(*_: Any) -> Any:
        raise MemoryError("no more")

    gate.run = fail
    gate.opened.set()
    with pytest.raises(EngineDeadError, match="MemoryError: no more") as caught:
        await tokens_of(stream)
    assert caught.value.replica == "r1"
    await until_in_loop(lambda: not ingress.links.ready)
    num_connections = replica.server._num_ingresses
    await until_in_loop(lambda: replica.server._num_ingresses >= num_connections + 2)  # it tries again
    assert not ingress.links.ready


FORM = StructuredOutputsParams(regex="a+")


def hold_compilations(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the replica compile grammars until the event is set, to none."""
    may_end = asyncio.Event()

    async def compile_grammar(request: EngineRequest) -> None:
        await may_end.wait()

    monkeypatch.setattr(replica.engine, "compile_grammar", compile_grammar)
    return may_end


async def test_grammars_are_compiled_while_other_requests_run(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    streams = [ingress.submit([i], 5, structured_outputs=FORM) for i in range(3)]
    plain = ingress.submit([9], 5)
    ingress.links["r1"].cancel(streams[0])
    assert await tokens_of(plain) == replica.answer([9], 5)
    for stream in streams[1:]:
        with pytest.raises(RequestError):  # the shadow engine has no tokenizer
            await tokens_of(stream)
    await until_in_loop(lambda: replica.is_idle)


async def _read_all(stream: Dispatch, tokens: list[int]) -> None:
    """Read until the stream fails."""
    while True:
        await stream.wait()
        if (output := stream.take()) is not None:
            tokens += output.token_ids


async def test_a_draining_replica_hands_over_what_does_not_end_in_time(peers: Peers) -> None:
    replica, ingress = await peers.pair()
    in_lockstep(replica)
    running = [ingress.submit([number], 200) for number in range(3)]
    for stream in running:
        await stream.wait()
    assert await replica.server.drain(lambda: 0.0) == 3
    for number, stream in enumerate(running):
        tokens: list[int] = []
        with pytest.raises(HandedOverError) as handed_over:
            await _read_all(stream, tokens)
        assert handed_over.value.replica == "r1"
        assert 0 < len(tokens) < 200
        assert tokens == replica.answer([number], 200)[: len(tokens)]
        assert stream.is_handed_over
    assert ingress.links.ready == []  # although Serve still lists it
    assert replica.is_idle


async def test_a_notice_that_comes_while_a_replica_drains_hands_its_requests_over(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DRAIN_POLL_S", 0.0)
    replica, ingress = await peers.pair()
    in_lockstep(replica)
    stream = ingress.submit([1], 200)
    await stream.wait()
    left_s = iter([inf, inf])
    assert await replica.server.drain(lambda: next(left_s, 0.0)) == 1
    with pytest.raises(HandedOverError):
        await _read_all(stream, [])


async def test_a_draining_replica_finishes_a_request_whose_grammar_compiles(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, ingress = await peers.pair()
    may_end = hold_compilations(replica, monkeypatch)
    stream = ingress.submit([1], 5, structured_outputs=FORM)
    (served,) = replica.server._ingresses.values()
    await until_in_loop(lambda: served.compiling)
    draining = asyncio.create_task(replica.server.drain())
    await asyncio.sleep(0)  # it has begun
    assert not draining.done()
    may_end.set()
    assert await tokens_of(stream) == replica.answer([1], 5)
    await draining


@pytest.mark.parametrize("how", ["its ingress is lost", "it is aborted"])
async def test_a_request_that_ends_while_its_grammar_compiles_is_never_queued(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    replica, ingress = await peers.pair()
    server, may_end = replica.server, hold_compilations(replica, monkeypatch)
    stream = ingress.submit([1], 5, structured_outputs=FORM)
    ((identity, served),) = server._ingresses.items()
    await until_in_loop(lambda: served.compiling)
    (compiling,) = served.compiling.values()
    if how == "it is aborted":
        ingress.links["r1"].cancel(stream)
        await until_in_loop(lambda: served.arrivals.received == 2)
    else:
        server._remove(identity, how)
    may_end.set()
    await asyncio.wait([compiling])
    assert not server._count.num_started
    assert compiling.cancelled()
    await until_in_loop(lambda: replica.is_idle)


async def test_a_request_is_aborted_also_just_after_its_grammar_has_compiled(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: while the event loop had still to forget the compilation, the abort did nothing."""
    replica, ingress = await peers.pair()
    engine, aborted = replica.engine, list[str]()
    submit, abort = engine.submit, engine.abort
    (served,) = replica.server._ingresses.values()

    def submit_then_abort(*args: Any) -> None:
        submit(*args)
        asyncio.get_running_loop().call_soon(replica.server._abort, served, 1)

    def record(request_id: str) -> None:
        aborted.append(request_id)
        abort(request_id)

    hold_compilations(replica, monkeypatch).set()
    monkeypatch.setattr(engine, "submit", submit_then_abort)
    monkeypatch.setattr(engine, "abort", record)
    ingress.submit([1], 200, structured_outputs=FORM)
    await until_in_loop(lambda: replica.server._count.num_started and replica.is_idle)
    assert aborted == [served.key(1)]
