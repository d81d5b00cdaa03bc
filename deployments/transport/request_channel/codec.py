"""Messages to bytes and back, and requests to messages and back.

Bytes that fit no message raise ``ChannelMessageError``; the receiver drops them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import astuple, replace

from deployments.transport.hashes import pack_hashes
from deployments.transport.request_channel.messages import (
    Abort,
    Copy,
    FromIngress,
    FromReplica,
    Hello,
    Outputs,
    Status,
    Submit,
)
from engine.errors import PagodaError, RequestError
from engine.kv.tiers.copies import CopyOrder
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = [
    "ChannelMessageError",
    "copy_order_of",
    "decode_from_ingress",
    "decode_from_replica",
    "encode",
    "encode_copy",
    "encode_request",
    "request_of",
]

_TEXTS: Final = ("stop", "bad_words")  # may hold unpaired surrogates, which msgpack's strings cannot
_UNBOUNDED: Final = ("top_k", "max_tokens", "min_tokens")
_MAX_INT: Final = 2**63 - 1  # a larger bound has the same effect, and does not fit


class ChannelMessageError(PagodaError, ValueError):
    """Bytes that no peer of this version sends."""


_encode = msgspec.msgpack.Encoder().encode
_from_ingress: msgspec.msgpack.Decoder[FromIngress] = msgspec.msgpack.Decoder(Hello | Submit | Abort | Copy)
_from_replica: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(Status | Outputs)
_request: msgspec.msgpack.Decoder[EngineRequest] = msgspec.msgpack.Decoder(EngineRequest)


def encode(message: FromIngress | FromReplica) -> bytes:
    """Return a message as msgpack."""
    return _encode(message)


def decode_from_ingress(data: bytes) -> FromIngress:
    """Return the message in ``data``; raises ChannelMessageError if it is not a message of an ingress."""
    try:
        return _from_ingress.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelMessageError(str(error)) from None


def decode_from_replica(data: bytes) -> FromReplica:
    """Return the message in ``data``; raises ChannelMessageError if it is not a message of a replica."""
    try:
        return _from_replica.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelMessageError(str(error)) from None


def encode_request(number: int, stream: int, request: EngineRequest, block_hashes: Sequence[int]) -> bytes:
    """Return a request as the Submit with this number.

    Raises:
        RequestError: a value does not fit the message: a number of more than 64 bits, say, or an unpaired surrogate.
    """
    try:
        prompt, output = _packed(request.prompt_token_ids), _packed(request.output_token_ids)
        packed = replace(request, prompt_token_ids=[], output_token_ids=[])
        texts: dict[str, list[bytes]] = {}
        try:
            fields = _encode(_fields(packed))
        except (OverflowError, UnicodeEncodeError):
            texts = _encoded_texts(request.params)
            fields = _encode(_fields(replace(packed, params=_bounded(request.params, without=texts))))
        hashes = pack_hashes(block_hashes) if block_hashes else b""
        return _encode(Submit(number, stream, msgspec.Raw(fields), prompt, output, hashes, texts))
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"the request cannot be sent to an engine: {error}") from None


def request_of(message: Submit, request_id: str) -> EngineRequest:
    """Return the request in a message, under another id.

    Raises:
        RequestError: a parameter is out of range.
        ChannelMessageError: the message cannot come from an ingress of this version.
    """
    try:
        request = _request.decode(message.request)
        params = replace(request.params, **_decoded_texts(message.texts)) if message.texts else request.params
        prompt, output = _token_ids(message.prompt), _token_ids(message.output)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error.__cause__, RequestError):  # of the constructor of the parameters
            raise error.__cause__ from None
        raise ChannelMessageError(str(error)) from None
    return replace(request, request_id=request_id, prompt_token_ids=prompt, params=params, output_token_ids=output)


def encode_copy(order: CopyOrder) -> bytes:
    """Return a text that is to be copied as a Copy."""
    return _encode(Copy(_packed(order.token_ids), order.cache_key, order.source, order.reason))


def copy_order_of(message: Copy) -> CopyOrder:
    """Return the text in a message; raises ChannelMessageError if the message cannot come from an ingress."""
    try:
        return CopyOrder(_token_ids(message.tokens), message.cache_key, message.source, message.reason)
    except ValueError as error:
        raise ChannelMessageError(str(error)) from None


def _fields(request: EngineRequest) -> tuple[Any, ...]:
    """Return the fields of a request in their order.

    The last one is left out if it has its default: a replica of the last version, which does not know it, then takes
    the request during a rolling update.
    """
    values = astuple(request)
    return values if request.retention else values[:-1]


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _token_ids(packed: bytes) -> list[int]:
    words = array("i")
    words.frombytes(packed)
    return words.tolist()


def _bounded(params: SamplingParams, *, without: Mapping[str, object]) -> SamplingParams:
    """Return parameters whose integers fit, without some of them."""
    values = {name: getattr(params, name) for name in _UNBOUNDED}
    bounded = {name: min(value, _MAX_INT) for name, value in values.items() if value is not None}
    return replace(params, **bounded, **dict.fromkeys(without, ()))


def _encoded_texts(params: SamplingParams) -> dict[str, list[bytes]]:
    texts = {name: getattr(params, name) for name in _TEXTS}
    return {name: [text.encode(errors="surrogatepass") for text in of_name] for name, of_name in texts.items()}


def _decoded_texts(texts: Mapping[str, list[bytes]]) -> dict[str, list[str]]:
    return {name: [text.decode(errors="surrogatepass") for text in texts[name]] for name in _TEXTS if name in texts}
