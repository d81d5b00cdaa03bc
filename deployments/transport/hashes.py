"""Block hashes as bytes: little-endian 64-bit words."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

__all__ = ["BYTES_PER_HASH", "pack_hashes", "unpack_hashes"]

BYTES_PER_HASH = 8


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return hashes as little-endian 64-bit words; raises OverflowError if one has more than 64 bits."""
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
