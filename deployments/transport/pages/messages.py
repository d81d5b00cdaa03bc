"""The messages of a transfer, and their layout on the wire.

Each message is its length, 4 bytes little-endian, and a msgpack array: a tag, then these fields in this order. The
bytes of the pages follow a Blocks message, without any framing of their own.

    message   direction           fields
    Hello     client -> server    version, secret, page format
    Welcome   server -> client
    Refusal   server -> client    reason; the connection ends
    Pull      client -> server    token ids, cache key, first block, number of blocks, milliseconds
    Blocks    server -> client    first block, sizes, checksums; then the bytes of all parts of these blocks
    End       server -> client    reason, empty if all blocks were sent

A connection begins with Hello and its answer. Then each Pull is answered by any number of Blocks, in ascending order
without gaps, and one End. Token ids are 32-bit little-endian words. Nothing here is pickled.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from engine.errors import PagodaError

__all__ = [
    "BUSY",
    "EVICTED",
    "MAX_BLOCKS_BYTES",
    "MAX_BLOCKS_PARTS",
    "MAX_HELLO_BYTES",
    "MAX_REPLY_BYTES",
    "MISSING",
    "VERSION",
    "Blocks",
    "End",
    "FromClient",
    "FromServer",
    "Hello",
    "PageMessageError",
    "Pull",
    "Refusal",
    "Welcome",
    "decode_from_client",
    "decode_from_server",
    "encode",
]

VERSION: Final = 1  # of this layout
BUSY: Final = "busy"  # the source answers others, or its engine is in a long step
EVICTED: Final = "evicted"  # the source needed the pages meanwhile
MISSING: Final = "missing"  # the source does not have the next block
MAX_HELLO_BYTES: Final = 16 * 2**10
MAX_REPLY_BYTES: Final = 64 * 2**10  # of one message from a server
MAX_BLOCKS_BYTES: Final = 4 * 2**20  # of the pages after one Blocks message, unless one block has more
MAX_BLOCKS_PARTS: Final = 512  # parts of all blocks of one Blocks message: one system call takes 1,024 buffers

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class PageMessageError(PagodaError):
    """Bytes that no peer of this version sends."""


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A schema: an array of exactly these fields, in this order, after the tag."""


class Hello(_Message, tag=1):
    """Opens a connection.

    Attributes:
        version: of the messages.
        secret: of the server, from its replica's metadata.
        page_format: everything that must be equal for pages to be exchanged, by name.
    """

    version: int
    secret: str
    page_format: dict[str, str]


class Welcome(_Message, tag=2):
    """The peers' pages are alike."""


class Refusal(_Message, tag=3):
    """The peers' pages are not alike, and will not be.

    Attributes:
        reason: names what differs, with both values.
    """

    reason: str


class Pull(_Message, tag=4):
    """Asks for blocks of a prompt.

    Attributes:
        token_ids: of the prompt, up to the end of the last block that is wanted.
        cache_key: ``EngineRequest.cache_key``.
        first_block: index of the first block that is wanted.
        num_blocks: blocks that are wanted, at most.
        timeout_ms: after which the client no longer waits.
    """

    token_ids: bytes
    cache_key: str
    first_block: _Count
    num_blocks: _Count
    timeout_ms: _Count

    @property
    def tokens(self) -> list[int]:
        """The token ids as numbers; raises PageMessageError if the bytes are not such."""
        words = array("I")
        try:
            words.frombytes(self.token_ids)
        except ValueError:
            raise PageMessageError(f"{len(self.token_ids)} bytes are no token ids") from None
        return words.tolist()


class Blocks(_Message, tag=5):
    """Blocks, whose bytes follow.

    Attributes:
        first_block: index in the prompt of the first one.
        sizes: of each block, the bytes of its page of each kind.
        checksums: of these pages; nil, with a size of 0: the source does not have that page.
    """

    first_block: _Count
    sizes: list[list[_Count]]
    checksums: list[list[_Count | None]]


class End(_Message, tag=6):
    """No more blocks are sent.

    Attributes:
        reason: why not all that were asked for: BUSY, EVICTED or MISSING; empty: they were.
    """

    reason: str


FromClient: TypeAlias = Hello | Pull
FromServer: TypeAlias = Welcome | Refusal | Blocks | End

encode = msgspec.msgpack.Encoder().encode
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_from_client(data: bytes) -> FromClient:
    """Return the message in ``data``; raises PageMessageError if it is not a message of a client."""
    try:
        return _from_client.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PageMessageError(str(error)) from None


def decode_from_server(data: bytes) -> FromServer:
    """Return the message in ``data``; raises PageMessageError if it is not a message of a server."""
    try:
        return _from_server.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PageMessageError(str(error)) from None
