"""A reader that takes nothing: what is kept for it is bounded, its request is paused, and no other stream notices."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from deployments.observability.ingress_metrics import STREAM_PAUSES, ingress_recorder
from deployments.transport.request_channel import dispatch as dispatch_module
from deployments.transport.request_channel.codec import decode_from_replica, encode
from deployments.transport.request_channel.dispatch import MAX_QUEUED_LOGPROBS, Dispatch
from deployments.transport.request_channel.errors import StreamPausedError
from deployments.transport.request_channel.messages import Outputs
from engine.outputs import EngineOutput, Logprob
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.transport.request_channel.peers import Peers, outputs_of, tokens_of
from tests.waiting import until_in_loop

REQUEST = EngineRequest("id", [1], SamplingParams())
BYTES_PER_TOKEN, MAX_LOGPROB_BYTES = 45, 1.4e6
TOP = 21  # log-probabilities of a token with top_logprobs 20


def _with_logprobs(count: int) -> bytes:
    """Return a message with so many tokens of stream 1, each with 21 log-probabilities."""
    positions = [{1000 + rank: Logprob(-float(rank) / 3, rank) for rank in range(TOP)} for _ in range(count)]
    output = EngineOutput("id", 0, [1000] * count, logprobs=positions, cumulative_logprob=-1.0)
    return encode(Outputs(1, [], [], [(1, output)], []))


def _put(stream: Dispatch, data: bytes) -> None:
    message = decode_from_replica(data)
    assert isinstance(message, Outputs)
    (_, output) = message.others[0]
    stream.put(output)


def test_the_bytes_that_are_kept_for_a_reader() -> None:
    """As the documentation says: of log-probabilities a fixed number, of tokens the rest of the answer."""
    data = _with_logprobs(1)
    with_logprobs, plain = Dispatch(REQUEST), Dispatch(REQUEST)
    tracemalloc.start()
    try:
        num_tokens = 0
        while not with_logprobs.is_full:
            _put(with_logprobs, data)
            num_tokens += 1
        of_logprobs = tracemalloc.get_traced_memory()[0]
        for token_id in range(100_000, 132_000):
            plain.put_token(token_id)
        of_tokens = tracemalloc.get_traced_memory()[0] - of_logprobs
    finally:
        tracemalloc.stop()
    assert num_tokens == MAX_QUEUED_LOGPROBS // TOP + 1
    assert 0.5 * MAX_LOGPROB_BYTES < of_logprobs < MAX_LOGPROB_BYTES
    assert 0.5 * BYTES_PER_TOKEN < of_tokens / 32_000 < BYTES_PER_TOKEN


def test_a_stream_is_full_until_its_reader_takes_the_outputs() -> None:
    stream = Dispatch(REQUEST)
    _put(stream, _with_logprobs(MAX_QUEUED_LOGPROBS // TOP))
    assert not stream.is_full
    _put(stream, _with_logprobs(1))
    assert stream.is_full
    output = stream.take()
    assert output is not None
    assert len(output.token_ids) == MAX_QUEUED_LOGPROBS // TOP + 1
    assert not stream.is_full


def test_one_output_of_any_size_does_not_fill_a_stream() -> None:
    """The log-probabilities of a whole vocabulary are more than are kept: each token would pause its request."""
    stream = Dispatch(REQUEST)
    for _ in range(2):
        _put(stream, _with_logprobs(MAX_QUEUED_LOGPROBS))
        assert not stream.is_full
        assert stream.take() is not None
    _put(stream, _with_logprobs(MAX_QUEUED_LOGPROBS))
    _put(stream, _with_logprobs(1))
    assert stream.is_full


async def test_a_stream_whose_reader_takes_nothing_is_paused_and_frees_its_blocks(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than the messages that a link takes before the other readers run.
    monkeypatch.setattr(dispatch_module, "MAX_QUEUED_LOGPROBS", 150)
    replica, ingress = await peers.pair(num_blocks=1024)
    before = _num_pauses()
    slow = ingress.submit([1, 2], 300, logprobs=0)
    others = [ingress.submit([3, number], 200, logprobs=0) for number in range(8)]
    answers = await asyncio.gather(*map(tokens_of, others))
    assert answers == [replica.answer([3, number], 200) for number in range(8)]
    await until_in_loop(lambda: replica.is_idle)
    assert not ingress.links["r1"].num_streams
    output = slow.take()
    assert output is not None
    assert len(output.token_ids) == 151
    assert output.token_ids == replica.answer([1, 2], 151)
    with pytest.raises(StreamPausedError):
        slow.take()
    assert _num_pauses() == before + 1


async def test_an_answer_that_ends_is_not_paused(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "MAX_QUEUED_LOGPROBS", 30)
    replica, ingress = await peers.pair()
    stream = ingress.submit([1, 2], 31, logprobs=0)
    await until_in_loop(lambda: replica.is_idle and not ingress.links["r1"].num_streams)
    (output,) = await outputs_of(stream)
    assert output.token_ids == replica.answer([1, 2], 31)


def _num_pauses() -> float:
    return sum(sample.value for sample in ingress_recorder().snapshot() if sample.metric is STREAM_PAUSES)
