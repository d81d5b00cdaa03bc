"""Where a prefix hit resumes, and which snapshots of states are kept so that later hits can resume.

These functions join the chain of blocks with what hangs on it: the pages of windows and the snapshots of states.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.kv.attachments.state_slots import StateSlots
from engine.kv.attachments.window_pages import WindowPages
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import HashedTokens, PrefixCache, PrefixMatch
from engine.sequence import Sequence

__all__ = ["leave_snapshot", "plan_snapshots", "resumable"]


def resumable(
    match: PrefixMatch,
    text: HashedTokens,
    block_size: int,
    windows: Collection[WindowPages],
    states: StateSlots | None,
) -> PrefixMatch:
    """Return the match with the tokens that need not be computed again.

    They end where every window has the pages within reach, and at a snapshot if there are states: on the device, or in
    the store of each. Blocks of the device after them are computed again, but need no memory of their own, unless
    windows would lack their pages.
    """
    last_position, num_blocks, before = text.num_tokens - 1, match.num_blocks, -1
    if states is not None:
        num_blocks = min(num_blocks, last_position // block_size)  # the last token must still be computed
    while num_blocks != before:
        before = num_blocks
        for window in windows:
            num_blocks = window.num_resumable(match, num_blocks, last_position)
        while states is not None and num_blocks and not states.snapshots.has(match, num_blocks - 1):
            num_blocks -= 1
    num_on_device = min(num_blocks, len(match.blocks)) if windows else len(match.blocks)
    blocks, pages = match.blocks[:num_on_device], match.pages[: max(0, num_blocks - len(match.blocks))]
    return PrefixMatch(
        blocks,
        pages,
        num_tokens=(len(blocks) + len(pages)) * block_size,
        num_resumed=min(num_blocks * block_size, last_position),
        num_chained=match.num_chained,
    )


def plan_snapshots(
    sequence: Sequence, num_tokens: int, block_size: int, states: StateSlots, chain: PrefixCache, pool: BlockPool
) -> None:
    """Plan the snapshots of a step that computes the sequence's tokens up to ``num_tokens``: see state_slots.py."""
    start = sequence.num_computed_tokens
    if num_tokens == start + 1 and num_tokens > sequence.num_prompt_tokens:  # a decode
        if start % block_size == 0:
            states.keep(sequence, pool.blocks[sequence.block_table[start // block_size - 1]])
        return
    likely = {(sequence.num_tokens - 1) // block_size * block_size, sequence.num_chained_tokens}
    wanted = likely.union(states.saves.positions_within(start, num_tokens))
    for position in sorted(position for position in wanted if start < position <= num_tokens):
        if (block := chain.holder(sequence, position // block_size - 1)) is not None:
            states.save(sequence, position, block, is_likely=position in likely)


def leave_snapshot(sequence: Sequence, states: StateSlots, chain: PrefixCache, pool: BlockPool) -> None:
    """Free a sequence's state; the snapshot of its answer stays, if the block that it hangs on is published."""
    kept_block = states.kept.block_of(sequence)
    if kept_block is not None and (block := pool.blocks[kept_block]).block_hash is None:
        holder = chain.holder(sequence, sequence.block_table.index(kept_block))
        if holder is None:
            states.kept.move_on(sequence)
        else:
            states.kept.end(sequence)
            states.snapshots.move(block, holder)
    else:
        states.kept.end(sequence)
    states.release(sequence)
