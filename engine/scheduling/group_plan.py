"""plan_group: how many tokens each sequence of one request computes in a step.

Most requests have one sequence, which computes all its known tokens as far as the step allows. After a recomputation
the sequences of a larger group start one after the other, so that each finds in the prefix cache the blocks that it
shares with the earlier ones.
"""

from __future__ import annotations

from engine.kv.block_manager import BlockManager, Growth
from engine.sequence import Sequence

__all__ = ["plan_group"]


def plan_group(members: list[Sequence], max_chunk: int, block_manager: BlockManager) -> list[Growth]:
    """Return up to which token each of a group's unfinished sequences computes in this step.

    At most one of them, the first that lags, computes more than its last token. Beams are compared by the logits of
    one step: none of them computes its last token before all can.

    Args:
        members: the sequences, in order.
        max_chunk: tokens that the lagging sequence may compute, at most.
        block_manager: the pool that matches the prefix of a sequence that starts.
    """
    lagging = next((one for one in members if not _can_decode(one)), None)
    if lagging is None:
        return [Growth(one, one.num_tokens) for one in members]
    others_can_decode = all(one is lagging or _can_decode(one) for one in members)
    is_search = lagging.group.beams is not None
    match = None if lagging.block_table else block_manager.match_prefix(lagging)
    start = lagging.num_computed_tokens if match is None else min(match.num_tokens, lagging.num_tokens - 1)
    wanted = lagging.num_tokens - start - (is_search and not others_can_decode)
    end = start + min(wanted, max_chunk)
    others_wait = is_search and end < lagging.num_tokens
    growths = []
    for one in members:
        if one is lagging:
            growths.append(Growth(one, end, match))
        else:
            computes = _can_decode(one) and not others_wait
            growths.append(Growth(one, one.num_computed_tokens + computes))
    return growths


def _can_decode(sequence: Sequence) -> bool:
    """Whether only the last token of a sequence remains to be computed."""
    return sequence.remaining_tokens == 1 and bool(sequence.block_table)
