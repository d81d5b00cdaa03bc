"""Messages to bytes and back: msgpack with a fixed schema and size limits.

Bytes that do not fit the schema raise ``KVMessageError``; the receiver counts and drops them. A dropped batch of events
is a gap like a lost one: the next message's number shows it (feed.py).
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from deployments.transport.hashes import BYTES_PER_HASH
from deployments.transport.kv_events.messages import (
    CLEARED,
    MAX_SNAPSHOT_BYTES,
    AwaitedMessage,
    EventsMessage,
    LoadMessage,
    Snapshot,
)
from engine.errors import PagodaError

__all__ = [
    "MAX_MESSAGE_BYTES",
    "KVMessageError",
    "Reason",
    "decode_awaited",
    "decode_events",
    "decode_load",
    "decode_snapshot",
    "encode",
]

MAX_MESSAGE_BYTES = 4 * 2**20  # of every message but a snapshot

Reason = Literal["malformed", "oversized"]


class KVMessageError(PagodaError, ValueError):
    """Bytes that no publisher of this version sends."""

    def __init__(self, message: str, reason: Reason = "malformed") -> None:
        super().__init__(message)
        self.reason: Reason = reason


_Any = TypeVar("_Any", AwaitedMessage, EventsMessage, LoadMessage, Snapshot)

_encode = msgspec.msgpack.Encoder().encode
_awaited_decoder = msgspec.msgpack.Decoder(AwaitedMessage)
_events_decoder = msgspec.msgpack.Decoder(EventsMessage)
_load_decoder = msgspec.msgpack.Decoder(LoadMessage)
_snapshot_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode(message: AwaitedMessage | EventsMessage | LoadMessage | Snapshot) -> bytes:
    """Return a message as msgpack."""
    if isinstance(message, Snapshot):
        return _encode_snapshot(message)
    return _encode(message)


def _encode_snapshot(message: Snapshot) -> bytes:
    """Return a snapshot without the fields that it does not need, as ingresses before these fields expect it."""
    fields: tuple[object, ...] = (message.run_id, message.number, message.packed)
    if message.packed_shared:
        return _encode(message)
    if message.packed_states is not None or message.packed_saved:
        fields += (message.packed_states, message.packed_saved)
    return _encode(fields)


def decode_awaited(data: bytes) -> AwaitedMessage:
    """Return the awaited blocks in ``data``; raises KVMessageError if it is anything else."""
    message = _decode(_awaited_decoder, data, MAX_MESSAGE_BYTES)
    _check_packed(message.packed)
    return message


def decode_events(data: bytes) -> EventsMessage:
    """Return the events in ``data``; raises KVMessageError if it is anything else."""
    message = _decode(_events_decoder, data, MAX_MESSAGE_BYTES)
    for kind, packed in message.groups:
        _check_packed(packed)
        if bool(packed) == (kind == CLEARED):
            raise KVMessageError(f"a run of kind {kind} comes with {len(packed)} bytes of hashes")
    return message


def decode_load(data: bytes) -> LoadMessage:
    """Return the load report in ``data``; raises KVMessageError if it is anything else."""
    return _decode(_load_decoder, data, MAX_MESSAGE_BYTES)


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot in ``data``; raises KVMessageError if it is anything else."""
    message = _decode(_snapshot_decoder, data, MAX_SNAPSHOT_BYTES)
    _check_packed(message.packed)
    _check_packed(message.packed_states or b"")
    _check_packed(message.packed_saved)
    _check_packed(message.packed_shared)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[_Any], data: bytes, max_bytes: int) -> _Any:
    if len(data) > max_bytes:
        raise KVMessageError(f"a message of {len(data)} bytes exceeds {max_bytes}", "oversized")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise KVMessageError(str(error)) from None


def _check_packed(packed: bytes) -> None:
    if len(packed) % BYTES_PER_HASH:
        raise KVMessageError(f"{len(packed)} bytes are not a whole number of {BYTES_PER_HASH}-byte hashes")
