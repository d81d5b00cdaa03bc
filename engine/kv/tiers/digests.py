"""Digests name a block across engines and restarts: by the model, the cache key, and every token up to its last.

The 64-bit hash of ``prefix_hash`` is good for a router, and for a cache that compares tokens and parents. A store that
outlives the engine has no parents to compare with, so it uses a name that no one can forge: blake2b with 128 bits.

    root      blake2b(format digest, cache key)
    block i   blake2b(digest of block i - 1, packed tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from engine.kv.prefix_hash import BYTES_PER_TOKEN, pack_tokens, packed_block_hash, root_hash

__all__ = ["DIGEST_BYTES", "TokenChain", "next_digest", "root_digest"]

DIGEST_BYTES = 16


def root_digest(format_digest: bytes, cache_key: str) -> bytes:
    """Return the root of the digests of one model's blocks and ``EngineRequest.cache_key``."""
    return blake2b(format_digest + cache_key.encode(), digest_size=DIGEST_BYTES).digest()


def next_digest(parent: bytes, packed: bytes) -> bytes:
    """Return the digest of a block after the block, or root, ``parent``; its tokens are packed by ``pack_tokens``."""
    return blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


class TokenChain:
    """The full blocks of a text, with their hashes and digests, which are computed on demand.

    It can be matched as a sequence is: see ``prefix_cache.HashedTokens``.

    Args:
        token_ids: of the text; what follows the last full block is ignored.
        block_size: tokens per block.
        cache_key: of the request.
        model: as configured; the root of the hashes.
        format_digest: of ``PageFormat``; the root of the digests.
    """

    def __init__(
        self, token_ids: Sequence[int], block_size: int, *, cache_key: str, model: str, format_digest: bytes
    ) -> None:
        self.token_ids = token_ids
        self.block_size = block_size
        self.cache_key = cache_key
        self._hashes = [root_hash(model, cache_key)]
        self._digests = [root_digest(format_digest, cache_key)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Full blocks."""
        return len(self.token_ids) // self.block_size

    def packed(self, index: int) -> bytes:
        """Return the tokens of block ``index``, packed."""
        return pack_tokens(self.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def block_hash(self, index: int, block_size: int) -> int:
        """Return the chained hash of block ``index``, by which routers and the prefix cache name it."""
        assert block_size == self.block_size
        while len(self._hashes) <= index + 1:
            self._hashes.append(packed_block_hash(self._hashes[-1], self.packed(len(self._hashes) - 1)))
        return self._hashes[index + 1]

    def digest(self, index: int) -> bytes:
        """Return the digest of block ``index``; -1: of the root."""
        if len(self._digests) <= index + 1:
            width = self.block_size * BYTES_PER_TOKEN
            first = len(self._digests) - 1
            packed = pack_tokens(self.token_ids[first * self.block_size : (index + 1) * self.block_size])
            for start in range(0, len(packed), width):
                self._digests.append(next_digest(self._digests[-1], packed[start : start + width]))
        return self._digests[index + 1]
