"""KV events: what a block manager tells whoever routes requests by cached prefixes.

Hashes are the chained ones of prefix_hash, so equal hashes on two replicas mean equal prefixes. Each step's events are
one batch; batches are numbered within a generation (one life of an engine), so that a gap or a restart is noticed.
Whoever applies them in order knows all that is published, and nothing else. A stored block's parent is nearly always
stored too, but that is no promise: see prefix_cache.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent", "KVEventBatch"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block can be hit from now on."""

    block_hash: int
    parent_hash: int  # of the block before it; the chain's root for a first block
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was evicted or replaced."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """What one step changed. It pickles."""

    generation: int  # of the engine: another one means that its cache began empty
    number: int  # within the generation, from 0, without gaps
    events: tuple[KVEvent, ...]
