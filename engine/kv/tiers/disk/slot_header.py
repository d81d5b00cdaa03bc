"""SlotHeader: what a slot of the disk cache says about the page that follows it.

    magic  version  generation  digest  parent  hash  index  page checksum  tokens ...  header checksum

A write that was cut, or a slot that was written over in part, shows as a wrong checksum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from engine.kv.prefix_hash import BYTES_PER_TOKEN
from engine.kv.tiers.page_format import FORMAT_VERSION

__all__ = ["SlotHeader"]

_MAGIC = b"PGKVSLOT"
_FIELDS = struct.Struct("<8sIQ16s16sQIQI")
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The name of a page and of what comes before it.

    Attributes:
        digest: of the block: see digests.py.
        parent: digest of the block before it, or the root's.
        block_hash: by which routers name it.
        index: of the block in its text.
        tokens: of the block, packed.
        page_checksum: of the page.
        generation: rises with each text that is saved, so that the order of use survives a restart.
    """

    digest: bytes
    parent: bytes
    block_hash: int
    index: int
    tokens: bytes
    page_checksum: int
    generation: int

    @staticmethod
    def num_bytes(block_size: int) -> int:
        """Return the bytes that a header takes in a slot."""
        size = _FIELDS.size + block_size * BYTES_PER_TOKEN + _CHECKSUM.size
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def pack(self, block_size: int) -> bytes:
        """Return the header's bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.generation,
            self.digest,
            self.parent,
            self.block_hash,
            self.index,
            self.page_checksum,
            len(self.tokens),
        )
        body = fields + self.tokens
        return (body + _CHECKSUM.pack(xxh3_64_intdigest(body))).ljust(self.num_bytes(block_size), b"\0")

    @classmethod
    def unpack(cls, data: bytes, block_size: int) -> SlotHeader | None:
        """Return the header in a slot's first bytes; None if there is none, or it is damaged."""
        end = _FIELDS.size + block_size * BYTES_PER_TOKEN
        if len(data) < end + _CHECKSUM.size or data[: len(_MAGIC)] != _MAGIC:
            return None
        if _CHECKSUM.unpack_from(data, end)[0] != xxh3_64_intdigest(data[:end]):
            return None
        _, version, generation, digest, parent, block_hash, index, page_checksum, size = _FIELDS.unpack_from(data)
        if version != FORMAT_VERSION or size != block_size * BYTES_PER_TOKEN:
            return None
        return cls(digest, parent, block_hash, index, data[_FIELDS.size : end], page_checksum, generation)
