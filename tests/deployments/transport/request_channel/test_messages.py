"""Requests, outputs and errors survive the way through the channel's messages."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.transport.request_channel.codec import (
    ChannelMessageError,
    copy_order_of,
    decode_from_ingress,
    decode_from_replica,
    encode,
    encode_copy,
    encode_request,
    request_of,
)
from deployments.transport.request_channel.errors import (
    HandedOverError,
    ReplicaDrainingError,
    ReplicaFullError,
    error_of,
    failure_of,
)
from deployments.transport.request_channel.messages import Abort, Copy, Hello, Outputs, Status, Submit
from engine.errors import EngineDeadError, OverloadedError, PromptTooLongError, RequestError
from engine.kv.tiers.copies import CopyOrder, CopyReason
from engine.options.structured_outputs import StructuredOutputsParams
from engine.options.thinking_budget import ThinkingBudget
from engine.outputs import EngineOutput, FinishReason, Logprob, RequestTiming
from engine.pooling.params import PoolingParams
from engine.request import EngineRequest, KVSource
from engine.sampling_params import SamplingParams

ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(), min_size=1, max_size=8)  # with half characters
forms = st.one_of(
    st.builds(lambda text: StructuredOutputsParams(regex=text), st.sampled_from(["a+", "é|ж"])),
    st.builds(lambda names: StructuredOutputsParams(choice=names), st.lists(st.sampled_from("abcé"), min_size=1)),
    st.builds(
        lambda name: StructuredOutputsParams(json={"type": "object", "properties": {name: {"type": "integer"}}}),
        st.sampled_from(["x", "é"]),
    ),
    st.just(StructuredOutputsParams(json_object=True)),
    st.just(StructuredOutputsParams(grammar='start: "a"+')),
)
sampled: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 128),
    "temperature": st.floats(0.1, 2.0),
    "top_p": st.floats(0.0, 1.0, exclude_min=True),
    "top_k": st.integers(-1, 2**40),
    "min_p": st.floats(0.0, 1.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "repetition_penalty": st.floats(0.5, 2.0),
    "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=20),
    "allowed_token_ids": st.lists(ids, min_size=1, max_size=20),
    "bad_words": st.lists(texts, max_size=5),
    "bad_words_token_ids": st.lists(st.lists(ids, min_size=1, max_size=4), max_size=5),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "max_tokens": st.one_of(st.none(), st.integers(2**20, 2**62)),
    "min_tokens": st.integers(0, 2**20),
    "stop": st.one_of(st.none(), texts, st.lists(texts, max_size=4)),
    "stop_token_ids": st.lists(ids, max_size=20),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.one_of(st.none(), st.integers(0, 20)),
    "prompt_logprobs": st.one_of(st.none(), st.integers(0, 20)),
    "structured_outputs": st.one_of(st.none(), forms),
}
beams: dict[str, st.SearchStrategy[Any]] = {
    "beam_width": st.integers(4, 64),
    "n": st.integers(1, 4),
    "temperature": st.just(0.0),
    "length_penalty": st.floats(-10, 10),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "stop_token_ids": st.lists(ids, max_size=5),
}
thinking = st.builds(ThinkingBudget, st.integers(0, 2**31 - 1), ids, st.one_of(st.none(), ids))
params = st.one_of(
    st.fixed_dictionaries({"thinking_budget": thinking}),
    st.fixed_dictionaries(
        {"logprobs": st.integers(0, 20), "logprob_token_ids": st.lists(ids, min_size=1, max_size=128)}
    ),
    st.fixed_dictionaries({}, optional={"max_tokens": st.just(2**20), **sampled}),
    st.fixed_dictionaries(beams),
    st.fixed_dictionaries({"temperature": st.just(0.0)}, optional={"logprobs": sampled["logprobs"]}),
)


@given(
    params,
    st.lists(ids, max_size=50),
    st.lists(ids, max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=5),
    st.ip_addresses().map(str),
    st.lists(st.integers(0, 2**64 - 1), max_size=5),
    st.none() | st.builds(KVSource, st.text(max_size=30), st.text(max_size=8), st.integers(0, 2**40)),
)
@settings(max_examples=100, deadline=None)
def test_a_request_arrives_as_it_was(
    values: dict[str, Any],
    prompt: list[int],
    output: list[int],
    priority: int,
    salt: str,
    client: str,
    hashes: list[int],
    source: KVSource | None,
) -> None:
    if values.get("min_tokens", 0) > (values.get("max_tokens", 16) or math.inf):
        values = values | {"max_tokens": None}
    request = EngineRequest("id", prompt, SamplingParams(**values), priority, salt, client, output, kv_source=source)
    message = decode_from_ingress(encode_request(3, 7, request, hashes))
    assert isinstance(message, Submit)
    assert (message.number, message.stream) == (3, 7)
    arrived = request_of(message, "other")
    assert arrived == replace(request, request_id="other")
    assert list(arrived.params.ids_by_parameter()) == list(request.params.ids_by_parameter())
    assert len(message.hashes) == 8 * len(hashes)


@given(
    st.builds(
        PoolingParams,
        st.one_of(st.none(), st.integers(1, 2**20)),
        st.one_of(st.none(), st.booleans()),
        st.booleans(),
        st.one_of(st.none(), st.integers(0, 2**20)),
    ),
    st.binary(max_size=40),
)
@settings(max_examples=30, deadline=None)
def test_a_text_and_its_vector_arrive_as_they_were(pooling: PoolingParams, vector: bytes) -> None:
    request = EngineRequest("id", [1, 2], pooling=pooling)
    message = decode_from_ingress(encode_request(1, 1, request, []))
    assert isinstance(message, Submit)
    assert request_of(message, "id") == request
    output = EngineOutput("", 0, [], FinishReason.STOP, is_last=True, pooled=vector)
    arrived = decode_from_replica(encode(Outputs(1, [], [], [(1, output)], [])))
    assert isinstance(arrived, Outputs)
    assert arrived.others == [(1, output)]
    assert EngineOutput.join([output, output]).pooled == vector


@given(st.lists(ids, max_size=50), st.text(max_size=5), st.sampled_from(["replication", "drain", "warm_up"]))
@settings(max_examples=30, deadline=None)
def test_a_text_to_copy_arrives_as_it_was(tokens: list[int], cache_key: str, reason: CopyReason) -> None:
    order = CopyOrder(tokens, cache_key, KVSource("tcp://10.0.0.1:5", "secret", 8), reason)
    message = decode_from_ingress(encode_copy(order))
    assert isinstance(message, Copy)
    assert copy_order_of(message) == order
    with pytest.raises(ChannelMessageError):
        copy_order_of(Copy(b"123", cache_key, order.source, reason))
    with pytest.raises(ChannelMessageError):
        decode_from_ingress(encode(Copy(b"", cache_key, order.source, "theft")))  # type: ignore[arg-type]


def test_bounds_beyond_64_bits_stay_bounds() -> None:
    request = EngineRequest("id", [1], SamplingParams(top_k=10**30, max_tokens=10**30, min_tokens=10**29))
    message = decode_from_ingress(encode_request(1, 1, request, []))
    assert isinstance(message, Submit)
    arrived = request_of(message, "id").params
    assert arrived.top_k == arrived.max_tokens == arrived.min_tokens == 2**63 - 1


@pytest.mark.parametrize(
    "bad", [{"prompt_token_ids": [2**31]}, {"prompt_token_ids": ["x"]}, {"cache_salt": "\ud800"}, {"priority": 2**64}]
)
def test_a_request_that_no_message_can_carry_is_an_error_of_the_request(bad: dict[str, Any]) -> None:
    request = EngineRequest(**({"request_id": "id", "prompt_token_ids": [1], "params": SamplingParams()} | bad))
    with pytest.raises(RequestError, match="cannot be sent"):
        encode_request(1, 1, request, [])


positions = st.dictionaries(
    ids, st.builds(Logprob, st.floats(allow_nan=False), st.integers(1, 2**40)), min_size=1, max_size=4
)
outputs = st.builds(
    EngineOutput,
    st.just("id"),
    st.integers(0, 3),
    st.lists(ids, max_size=4),
    st.one_of(st.none(), st.sampled_from(FinishReason)),
    st.one_of(st.none(), ids, st.text(max_size=5)),
    st.integers(0, 10**6),
    st.booleans(),
    st.one_of(st.none(), st.lists(positions, max_size=3)),
    st.one_of(st.none(), st.lists(st.one_of(st.none(), positions), max_size=3)),
    st.one_of(st.none(), st.floats(allow_nan=False)),
    st.one_of(st.none(), st.builds(RequestTiming, st.floats(0, 9), st.floats(0, 9), st.floats(0, 9))),
    st.just("r1"),
)


@given(st.lists(outputs, max_size=4))
def test_outputs_arrive_as_they_were(sent: list[EngineOutput]) -> None:
    arrived = decode_from_replica(encode(Outputs(1, [5], [6], list(enumerate(sent)), [])))
    assert isinstance(arrived, Outputs)
    assert arrived.others == list(enumerate(sent))
    for (_, output), other in zip(arrived.others, sent, strict=True):
        assert [list(position) for position in output.logprobs or ()] == [
            list(position) for position in other.logprobs or ()
        ]  # the order says which token was sampled
        assert type(output.finish_reason) is type(other.finish_reason)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("is bad", param="prompt", part="x", value=[1], remedy="mend it"),
        PromptTooLongError("is too long", param="prompt"),
        OverloadedError("the queue is full"),
        EngineDeadError("gone"),
        HandedOverError("the replica shuts down"),
        ReplicaFullError("full"),
        ReplicaDrainingError("draining"),
        RuntimeError("a bug"),
    ],
)
def test_errors_arrive_as_they_were(error: Exception) -> None:
    message = decode_from_replica(encode(Outputs(1, [], [], [], [failure_of(3, error)])))
    assert isinstance(message, Outputs)
    arrived = error_of(message.failures[0], "r1")
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    if isinstance(error, RequestError):
        assert isinstance(arrived, RequestError)
        assert (arrived.param, arrived.part, arrived.value) == (error.param, error.part, error.value)
    if isinstance(arrived, OverloadedError | EngineDeadError | HandedOverError):
        assert arrived.replica == "r1"


def test_an_error_of_another_kind_is_a_runtime_error() -> None:
    arrived = error_of(failure_of(3, ZeroDivisionError("by zero")), "r1")
    assert (type(arrived), str(arrived)) == (RuntimeError, "by zero")


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(data: bytes) -> None:
    for decode in (decode_from_ingress, decode_from_replica):
        try:
            message = decode(data)
        except ChannelMessageError:
            continue
        assert isinstance(message, Hello | Submit | Abort | Status | Outputs)


def test_an_error_says_what_is_wrong_with_the_bytes() -> None:
    for decode in (decode_from_ingress, decode_from_replica):
        with pytest.raises(ChannelMessageError, match="truncated"):
            decode(b"")


def submit(params: dict[str, Any], prompt: bytes = b"", texts: dict[str, list[bytes]] | None = None) -> Submit:
    """Return a message with these parameters, which need not be valid."""
    fields = msgspec.msgpack.encode(["id", [], params, 0, "", "", []])
    message = decode_from_ingress(encode(Submit(1, 1, msgspec.Raw(fields), prompt, b"", b"", texts or {})))
    assert isinstance(message, Submit)
    return message


def test_a_parameter_out_of_range_is_the_same_error_as_in_the_ingress() -> None:
    for params in ({"temperature": -5.0}, {"n": 0}, {"structured_outputs": {}}, {"thinking_budget": [-1, 0]}):
        with pytest.raises(RequestError) as refused:
            request_of(submit(params), "id")
        with pytest.raises(RequestError) as expected:
            SamplingParams(
                **params
                | ({"structured_outputs": StructuredOutputsParams()} if "structured_outputs" in params else {})
                | ({"thinking_budget": ThinkingBudget(-1, 0)} if "thinking_budget" in params else {})
            )
        assert str(refused.value) == str(expected.value)


@pytest.mark.parametrize(
    "params", [{"unknown": 1}, {"stop": [1]}, {"structured_outputs": {"x": 1}}, {"n": "x"}, {"logit_bias": {"x": 1}}]
)
def test_parameters_that_no_ingress_packs_are_an_error(params: dict[str, Any]) -> None:
    with pytest.raises(ChannelMessageError):
        request_of(submit(params), "id")


def test_token_ids_and_texts_that_no_ingress_packs_are_an_error() -> None:
    with pytest.raises(ChannelMessageError):
        request_of(submit({}, prompt=b"123"), "id")
    with pytest.raises(ChannelMessageError):
        request_of(submit({}, texts={"stop": [b"\xff"]}), "id")
    with pytest.raises(RequestError, match="at most 4"):
        request_of(submit({}, texts={"stop": [b"x"] * 5}), "id")
    with pytest.raises(ChannelMessageError):
        request_of(Submit(1, 1, msgspec.Raw(b"\xc1"), b"", b"", b"", {}), "id")
