"""KV messages: what an engine replica tells every ingress, as bytes, and the topics under which it tells it.

    e/<replica>/          events     what one step changed in the prefix cache, in order
    a/<replica>/          awaited    the blocks that a request which has just joined the queue will need
    l/<replica>/          load       how busy the engine is, and up to where events were sent
    s/<replica>/<nonce>/  snapshot   everything that is cached behind batch ``number``, for whoever subscribed to it

A message is msgpack of a fixed schema; block hashes travel as little-endian 64-bit words. Whatever does not fit the
schema is a ``KVMessageError`` for who decodes it, and nothing else is ever done with it. The tokens of a prompt have
no place in the schema, so none can leave the replica. This module knows nothing of sockets or of what is done with a
message.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Meta

from engine.errors import ConfigError, PagodaError
from engine.kv.events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from engine.observability.load import EngineLoad

__all__ = [
    "CLEARED",
    "MAX_MESSAGE_BYTES",
    "MAX_RUNS",
    "MAX_SNAPSHOT_BYTES",
    "NONCE_LENGTH",
    "REMOVED",
    "STORED",
    "AwaitedMessage",
    "EventsMessage",
    "KVMessageError",
    "LoadMessage",
    "Reason",
    "Snapshot",
    "Topics",
    "decode_awaited",
    "decode_events",
    "decode_load",
    "decode_snapshot",
    "encode",
    "events_message",
    "load_message",
    "pack_hashes",
    "unpack_hashes",
]

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_SNAPSHOT_BYTES = 64 * 2**20  # 8M blocks
MAX_RUNS = 2**16  # of one step's events
MAX_NAME_LENGTH = 256
NONCE_LENGTH = 16
BYTES_PER_HASH = 8

STORED: Final = 0
REMOVED: Final = 1
CLEARED: Final = 2

Reason = Literal["malformed", "oversized"]

_NONCE = re.compile(rb"[0-9a-f]{%d}" % NONCE_LENGTH)


class KVMessageError(PagodaError, ValueError):
    """A message that cannot be what a publisher of ours has sent."""

    def __init__(self, message: str, reason: Reason = "malformed") -> None:
        super().__init__(message)
        self.reason: Reason = reason


# ---- topics ----------------------------------------------------------------------------------------------------------


class Topics:
    """The topics of one replica. Each ends with a slash and names hold none, so that no topic begins with another's.

    Raises:
        ConfigError: ``replica`` is no name.
    """

    def __init__(self, replica: str) -> None:
        if not 0 < len(replica) <= MAX_NAME_LENGTH or not replica.isprintable():
            raise ConfigError(f"replica={replica[:40]!r} is no name; it needs 1 to {MAX_NAME_LENGTH} printable letters")
        name = quote(replica, safe="").encode()
        self.events: bytes = b"e/" + name + b"/"
        self.awaited: bytes = b"a/" + name + b"/"
        self.load: bytes = b"l/" + name + b"/"
        self.snapshots: bytes = b"s/" + name + b"/"

    def snapshot(self, nonce: str) -> bytes:
        """Return the topic of the one snapshot that is asked for under ``nonce``."""
        return self.snapshots + nonce.encode() + b"/"

    def is_snapshot(self, topic: bytes) -> bool:
        """Whether somebody who subscribes to ``topic`` asks this replica for a snapshot."""
        if not topic.startswith(self.snapshots) or not topic.endswith(b"/"):
            return False
        return _NONCE.fullmatch(topic[len(self.snapshots) : -1]) is not None


# ---- hashes ----------------------------------------------------------------------------------------------------------


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return hashes as little-endian 64-bit words."""
    return _little_endian(hashes[:] if isinstance(hashes, array) else array("Q", hashes)).tobytes()


def unpack_hashes(packed: bytes) -> Sequence[int]:
    """Return the hashes in ``packed``, whose length is a multiple of 8."""
    words = array("Q")
    words.frombytes(packed)
    return _little_endian(words)


def _little_endian(words: array[int]) -> array[int]:
    if sys.byteorder == "big":
        words.byteswap()
    return words


# ---- messages --------------------------------------------------------------------------------------------------------

_Count: TypeAlias = Annotated[int, Meta(ge=0)]  # msgpack knows no integer above 64 bits
_Number: TypeAlias = Annotated[int, Meta(ge=-1)]  # of a batch; -1: there was none yet
_Measure: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]  # which NaN and infinity do not pass
_Packed: TypeAlias = Annotated[bytes, Meta(max_length=MAX_SNAPSHOT_BYTES)]
_Run: TypeAlias = tuple[Literal[0, 1, 2], _Packed]  # STORED, REMOVED or CLEARED, and which hashes


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A schema: fields in this order, of exactly these types, none more and none less."""


class EventsMessage(_Message, frozen=True):
    """What one step changed."""

    generation: _Count
    number: _Count
    sent_at: _Measure  # time.time() of the sender
    runs: Annotated[list[_Run], Meta(max_length=MAX_RUNS)]

    def changes(self) -> Iterator[tuple[Literal[0, 1, 2], Sequence[int]]]:
        """Yield, in order, what became of which hashes."""
        for kind, packed in self.runs:
            yield kind, unpack_hashes(packed)


class AwaitedMessage(_Message, frozen=True):
    """What a request that joins the queue will need: blocks that are cached, and behind them those that will be."""

    packed: _Packed

    @property
    def hashes(self) -> Sequence[int]:
        """The hashes of a prompt's blocks, in order."""
        return unpack_hashes(self.packed)


class Snapshot(_Message, frozen=True):
    """What is cached behind batch ``number``."""

    generation: _Count  # 0 if nothing was published yet
    number: _Number
    packed: _Packed

    @property
    def hashes(self) -> Sequence[int]:
        """The hashes of all blocks."""
        return unpack_hashes(self.packed)


class _Load(_Message, frozen=True):
    """EngineLoad, field by field."""

    num_running: _Count
    num_waiting: _Count
    queued_prefill_tokens: _Count
    num_blocks: _Count
    num_free_blocks: _Count
    prefill_tokens_per_s: _Measure
    decode_step_s: _Measure
    num_steps: _Count


class LoadMessage(_Message, frozen=True):
    """How busy the engine is, and the last batch that was sent, so that the loss of the last one is noticed too."""

    generation: _Count
    number: _Number
    fields: _Load | None  # None: the engine has not said yet

    @property
    def load(self) -> EngineLoad | None:
        """The load as the engine reported it."""
        return None if self.fields is None else EngineLoad(*msgspec.structs.astuple(self.fields))


def events_message(batch: KVEventBatch, sent_at: float) -> EventsMessage:
    """Return what is sent of a batch: its order is kept, its tokens are not."""
    runs: list[tuple[Literal[0, 1, 2], list[int]]] = []
    for event in batch.events:
        kind = _kind(event)
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        if not isinstance(event, AllBlocksCleared):
            runs[-1][1].append(event.block_hash)
    return EventsMessage(batch.generation, batch.number, sent_at, [(kind, pack_hashes(run)) for kind, run in runs])


def _kind(event: KVEvent) -> Literal[0, 1, 2]:
    if isinstance(event, AllBlocksCleared):
        return CLEARED
    return STORED if isinstance(event, BlockStored) else REMOVED


def load_message(generation: int, number: int, load: EngineLoad | None) -> LoadMessage:
    """Return what is sent of a load report."""
    if load is None:
        return LoadMessage(generation, number, None)
    fields = _Load(
        load.num_running,
        load.num_waiting,
        load.queued_prefill_tokens,
        load.num_blocks,
        load.num_free_blocks,
        load.prefill_tokens_per_s,
        load.decode_step_s,
        load.num_steps,
    )
    return LoadMessage(generation, number, fields)


# ---- bytes -----------------------------------------------------------------------------------------------------------

_Any = TypeVar("_Any", AwaitedMessage, EventsMessage, LoadMessage, Snapshot)

_encode = msgspec.msgpack.Encoder().encode
_awaited_decoder = msgspec.msgpack.Decoder(AwaitedMessage)
_events_decoder = msgspec.msgpack.Decoder(EventsMessage)
_load_decoder = msgspec.msgpack.Decoder(LoadMessage)
_snapshot_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode(message: AwaitedMessage | EventsMessage | LoadMessage | Snapshot) -> bytes:
    """Return a message as it travels."""
    return _encode(message)


def decode_awaited(data: bytes) -> AwaitedMessage:
    """Return the awaited blocks in ``data``; raises KVMessageError if it is anything else."""
    message = _decode(_awaited_decoder, data, MAX_MESSAGE_BYTES)
    _check_packed(message.packed)
    return message


def decode_events(data: bytes) -> EventsMessage:
    """Return the events in ``data``; raises KVMessageError if it is anything else."""
    message = _decode(_events_decoder, data, MAX_MESSAGE_BYTES)
    for kind, packed in message.runs:
        _check_packed(packed)
        if bool(packed) == (kind == CLEARED):
            raise KVMessageError(f"a run of kind {kind} comes with {len(packed)} bytes of hashes")
    return message


def decode_load(data: bytes) -> LoadMessage:
    """Return the load in ``data``; raises KVMessageError if it is anything else."""
    return _decode(_load_decoder, data, MAX_MESSAGE_BYTES)


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot in ``data``; raises KVMessageError if it is anything else."""
    message = _decode(_snapshot_decoder, data, MAX_SNAPSHOT_BYTES)
    _check_packed(message.packed)
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
        raise KVMessageError(f"{len(packed)} bytes are no whole number of {BYTES_PER_HASH}-byte hashes")
