"""ObjectName: the name of a page's object, from which a listing alone tells all that an engine needs to use it.

    <format digest>/<kind>/<digest>-<parent>-<hash>-<index>        all but the index in hexadecimal

The format digest stands for the model's weights and options, the dtype and the layout of pages: see page_format.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from engine.kv.tiers.digests import DIGEST_BYTES

__all__ = ["ObjectName"]

_DIGEST: Final = rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}"
_PATTERN: Final = re.compile(rf"({_DIGEST})/(\d{{1,3}})/({_DIGEST})-({_DIGEST})-([0-9a-f]{{16}})-(\d{{1,9}})")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What the header of a page says, too: see ``SlotHeader``.

    Attributes:
        format_digest: of ``PageFormat``.
        kind: of page.
        digest: of the block.
        parent: digest of the block before it, or the root's.
        block_hash: by which routers name it.
        index: of the block in its text.
    """

    format_digest: bytes
    kind: int
    digest: bytes
    parent: bytes
    block_hash: int
    index: int

    def __str__(self) -> str:
        folder = f"{self.format_digest.hex()}/{self.kind}"
        return f"{folder}/{self.digest.hex()}-{self.parent.hex()}-{self.block_hash:016x}-{self.index}"

    @classmethod
    def parse(cls, path: str) -> ObjectName | None:
        """Return the name that a path within the storage is; None: it is another object."""
        if (match := _PATTERN.fullmatch(path)) is None:
            return None
        format_digest, kind, digest, parent, block_hash, index = match.groups()
        return cls(
            bytes.fromhex(format_digest),
            int(kind),
            bytes.fromhex(digest),
            bytes.fromhex(parent),
            int(block_hash, 16),
            int(index),
        )
