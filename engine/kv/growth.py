"""Growth: a plan to compute more tokens of a sequence, and the blocks that such plans take together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixMatch
from engine.sequence import Sequence

__all__ = ["Growth", "first_written", "num_new_blocks"]


@dataclass(frozen=True, slots=True)
class Growth:
    """A plan to compute a sequence's tokens up to ``end``; ``match`` is its cached prefix if it has no blocks yet."""

    sequence: Sequence
    end: int
    match: PrefixMatch | None = None


def first_written(sequence: Sequence, block_size: int) -> int:
    """Return the index in the block table of the block that the sequence's next token is written to."""
    return max(sequence.num_computed_tokens, sequence.num_matched_tokens) // block_size


def num_new_blocks(growths: Iterable[Growth], pool: BlockPool, block_size: int) -> int:
    """Return how many blocks, copies included, these sequences need beyond those that they have or match."""
    needed = 0
    writers: Counter[int] = Counter()
    for growth in growths:
        table, wanted = growth.sequence.block_table, -(-growth.end // block_size)
        held = len(table)
        if growth.match is None and growth.end == growth.sequence.num_computed_tokens:
            continue
        if growth.match is not None:
            held = growth.match.num_blocks
        elif (index := first_written(growth.sequence, block_size)) < min(held, wanted):
            writers[table[index]] += 1
        needed += max(0, wanted - held)
    for block_id, count in writers.items():  # all users of a shared block copy it, except the last
        needed += min(count, pool.blocks[block_id].ref_count - 1)
    return needed
