"""Messages to bytes and back, and the engine's objects to messages and back.

Bytes that fit no message raise ``ChannelMessageError``; the receiver drops them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from deployments.transport.hashes import pack_hashes
from deployments.transport.request_channel.messages import (
    Abort,
    FromIngress,
    FromReplica,
    Hello,
    Output,
    Outputs,
    Status,
    Submit,
)
from deployments.transport.request_channel.params import pack_params, unpack_params
from engine.errors import PagodaError, RequestError
from engine.outputs import EngineOutput, FinishReason, Logprob, RequestTiming, TokenLogprobs
from engine.request import EngineRequest

__all__ = [
    "ChannelMessageError",
    "decode_from_ingress",
    "decode_from_replica",
    "encode",
    "encode_request",
    "is_plain_token",
    "output_of",
    "pack_output",
    "request_of",
]


class ChannelMessageError(PagodaError, ValueError):
    """Bytes that no peer of this version sends."""


_encode = msgspec.msgpack.Encoder().encode
_from_ingress: msgspec.msgpack.Decoder[FromIngress] = msgspec.msgpack.Decoder(Hello | Submit | Abort)
_from_replica: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(Status | Outputs)


def encode(message: FromIngress | FromReplica) -> bytes:
    """Return a message as msgpack."""
    return _encode(message)


def decode_from_ingress(data: bytes) -> FromIngress:
    """Return the message in ``data``; raises ChannelMessageError if it is none of an ingress."""
    try:
        return _from_ingress.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelMessageError(str(error)) from None


def decode_from_replica(data: bytes) -> FromReplica:
    """Return the message in ``data``; raises ChannelMessageError if it is none of a replica."""
    try:
        return _from_replica.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelMessageError(str(error)) from None


# --- requests ---------------------------------------------------------------------------------------------------------


def encode_request(number: int, stream: int, request: EngineRequest, block_hashes: Sequence[int]) -> bytes:
    """Return a request as the Submit with this number.

    Raises:
        RequestError: a value does not fit the message: a number of more than 64 bits, say, or half a character.
    """
    try:
        return _encode(
            Submit(
                number,
                stream,
                request.request_id,
                array("i", request.prompt_token_ids).tobytes(),
                pack_params(request.params),
                request.priority,
                request.cache_salt,
                request.client,
                array("i", request.output_token_ids).tobytes(),
                pack_hashes(block_hashes) if block_hashes else b"",
            )
        )
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"the request cannot be sent to an engine: {error}") from None


def request_of(message: Submit, request_id: str) -> EngineRequest:
    """Return the request in a message, under another id.

    Raises:
        RequestError: a parameter is out of range.
        ChannelMessageError: the message cannot come from an ingress of this version.
    """
    try:
        params = unpack_params(message.params)
        prompt, output = _token_ids(message.prompt), _token_ids(message.output)
    except RequestError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ChannelMessageError(str(error)) from None
    return EngineRequest(request_id, prompt, params, message.priority, message.cache_salt, message.client, output)


def _token_ids(packed: bytes) -> list[int]:
    words = array("i")
    words.frombytes(packed)
    return words.tolist()


# --- outputs ----------------------------------------------------------------------------------------------------------


def is_plain_token(output: EngineOutput) -> bool:
    """Return whether an output is one token of answer 0 and nothing else."""
    return (
        len(output.token_ids) == 1
        and output.finish_reason is None
        and output.timing is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.cumulative_logprob is None
        and not output.index
        and not output.is_last
    )


def pack_output(stream: int, output: EngineOutput) -> Output:
    """Return an output of a stream as a message."""
    prompt_logprobs, timing = output.prompt_logprobs, output.timing
    return Output(
        stream,
        output.index,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        output.num_cached_tokens,
        output.is_last,
        None if output.logprobs is None else [_pack_logprobs(one) for one in output.logprobs],
        None
        if prompt_logprobs is None
        else [None if position is None else _pack_logprobs(position) for position in prompt_logprobs],
        output.cumulative_logprob,
        None if timing is None else (timing.queue_s, timing.prefill_s, timing.decode_s),
    )


def output_of(message: Output, request_id: str, replica: str) -> EngineOutput:
    """Return the output in a message.

    Args:
        message: the message.
        request_id: of its stream.
        replica: name of the replica that has sent it.
    """
    prompt_logprobs = message.prompt_logprobs
    return EngineOutput(
        request_id,
        message.index,
        message.token_ids,
        None if message.finish_reason is None else FinishReason(message.finish_reason),
        message.stop_reason,
        message.num_cached_tokens,
        message.is_last,
        None if message.logprobs is None else [_logprobs_of(one) for one in message.logprobs],
        None
        if prompt_logprobs is None
        else [None if position is None else _logprobs_of(position) for position in prompt_logprobs],
        message.cumulative_logprob,
        None if message.timing is None else RequestTiming(*message.timing),
        replica,
    )


def _pack_logprobs(position: TokenLogprobs) -> list[tuple[int, float, int]]:
    return [(token_id, one.logprob, one.rank) for token_id, one in position.items()]


def _logprobs_of(position: list[tuple[int, float, int]]) -> TokenLogprobs:
    return {token_id: Logprob(logprob, rank) for token_id, logprob, rank in position}
