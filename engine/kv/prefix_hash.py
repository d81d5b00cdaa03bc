"""The chained block hash, which the engine's prefix cache and the router share.

A block's hash covers its tokens and, through its parent's hash, every token before it. So equal hashes mean equal
prefixes, except for collisions, which the prefix cache makes harmless by comparing the token ids. The root of a chain
is salted with the model and the request's cache key, so that blocks are not shared across these.

The idea is vLLM's automatic prefix caching; the hash is xxHash (XXH64).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

__all__ = ["BYTES_PER_TOKEN", "block_hash", "hash_blocks", "pack_tokens", "packed_block_hash", "root_hash"]

BYTES_PER_TOKEN = array("I").itemsize


def root_hash(model: str, cache_key: str = "") -> int:
    """Return the root of the hash chains of one model and ``EngineRequest.cache_key``."""
    parts = [part.encode() for part in (model, cache_key)]
    # Length prefixes: ("ab", "c") and ("a", "bc") must not give the same bytes.
    return xxhash.xxh64_intdigest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Return the 64-bit hash of a block that holds ``token_ids`` and follows the block (or root) ``parent``."""
    return packed_block_hash(parent, pack_tokens(token_ids))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as the bytes that are hashed, ``BYTES_PER_TOKEN`` each."""
    return array("I", token_ids).tobytes()


def packed_block_hash(parent: int, packed: bytes) -> int:
    """Return ``block_hash`` of tokens packed by ``pack_tokens``."""
    return xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + packed)


def hash_blocks(token_ids: Sequence[int], block_size: int, root: int) -> list[int]:
    """Return the chained hashes of the full blocks of ``token_ids``; the last block has none if it is not full."""
    hashes: list[int] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
