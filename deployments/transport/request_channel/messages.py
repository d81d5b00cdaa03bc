"""The messages between an ingress and a replica, and their layout on the wire.

Each message is one ZeroMQ frame with a msgpack array: a tag, then these fields in this order. An ingress sends the
messages of one turn of its event loop as the frames of one ZeroMQ message.

    message   direction             fields
    Hello     ingress -> replica    secret, received, acknowledged, sent, resend
    Submit    ingress -> replica    number, stream, EngineRequest without token ids, prompt, output, hashes, texts
    Abort     ingress -> replica    number, stream
    Copy      ingress -> replica    token ids, cache key, source, reason
    Status    replica -> ingress    received, sent, resend, error or nil
    Outputs   replica -> ingress    number, [stream, ...], [token id, ...], [[stream, EngineOutput], ...], [Failure, ..]

Submit and Abort are numbered together from 1, and so are Outputs. A Copy is a hint: one that is lost is not repeated.
``received`` is the last number up to which the sender of the message has everything, ``sent`` the last one that it has
sent, so each side finds what it lacks (numbering.py). The ingress numbers its streams.

Nearly every output is one token of one stream. Those are two lists of integers, and every other one an EngineOutput.
Token ids of prompts are 32-bit, block hashes 64-bit little-endian words. Nothing here is pickled.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from engine.kv.tiers.copies import CopyReason
from engine.outputs import EngineOutput
from engine.request import KVSource

__all__ = ["Abort", "Copy", "Failure", "FromIngress", "FromReplica", "Hello", "Outputs", "Status", "Submit"]

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A schema: an array of exactly these fields, in this order, after the tag."""


class Hello(_Message, tag=1):
    """Opens a connection, and keeps it alive: sent at the start, periodically, and after a gap.

    Attributes:
        secret: of the replica, from its metadata; other connections are refused.
        received: number of the last Outputs that has arrived with all before it.
        acknowledged: number of the last request message that the replica is known to have received; with 0, and
            ``received`` 0, the connection is new.
        sent: number of the last request message that was sent.
        resend: Outputs after ``received`` are missing; send them again.
    """

    secret: str
    received: _Count
    acknowledged: _Count
    sent: _Count
    resend: bool


class Submit(_Message, tag=2):
    """A request.

    Attributes:
        request: the EngineRequest without its token ids. It is decoded on its own, so that an invalid one is refused
            under its number and stream.
        prompt: token ids.
        output: token ids that another replica has generated.
        hashes: of the full blocks of the prompt and the output.
        texts: parameters with unpaired surrogates, which a string of msgpack cannot hold.
    """

    number: _Count
    stream: _Count
    request: msgspec.Raw
    prompt: bytes
    output: bytes
    hashes: bytes
    texts: dict[str, list[bytes]]


class Abort(_Message, tag=3):
    """The client has gone: end the request of a stream."""

    number: _Count
    stream: _Count


class Copy(_Message, tag=6):
    """Read the KV of a text from another replica, when there is time and room, before a request needs it.

    Attributes:
        tokens: token ids.
        cache_key: of the text's requests.
        source: the other replica, which holds the KV.
        reason: why, the label of a metric.
    """

    tokens: bytes
    cache_key: str
    source: KVSource
    reason: CopyReason


class Status(_Message, tag=4):
    """The answer to a Hello, and the report of a gap in the request messages.

    Attributes:
        received: number of the last request message that has arrived with all before it.
        sent: number of the last Outputs that was sent.
        resend: request messages after ``received`` are missing; send them again.
        error: why the connection is refused or has ended.
    """

    received: _Count
    sent: _Count
    resend: bool
    error: str | None


class Failure(_Message):
    """A request that has ended with an error.

    Attributes:
        kind: of the error (errors.py).
        message: its text, for a RequestError without the parameter and the remedy.
        param, part, value, remedy: those of a RequestError. An EngineDeadError has a part if the replica has handed the
            request over.
    """

    stream: _Count
    kind: str
    message: str
    param: str | None = None
    part: str | None = None
    value: str | None = None
    remedy: str | None = None


class Outputs(_Message, tag=5):
    """What one step generated for the streams of one ingress.

    Attributes:
        streams: the streams that got a plain token (engine/outputs.py, StepOutputs).
        token_ids: the token of each.
        others: all other outputs.
    """

    number: _Count
    streams: list[int]
    token_ids: list[int]
    others: list[tuple[_Count, EngineOutput]]
    failures: list[Failure]


FromIngress: TypeAlias = Hello | Submit | Abort | Copy
FromReplica: TypeAlias = Status | Outputs
