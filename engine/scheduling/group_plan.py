"""plan_group: how many tokens each sequence of one request computes in a step.

Most requests have one sequence, which computes all its known tokens as far as the step allows. After a recomputation
the sequences of a larger group start one after the other, so that each finds in the prefix cache the blocks that it
shares with the earlier ones.
"""

from __future__ import annotations

from engine.kv.block_manager import BlockManager
from engine.kv.growth import Growth
from engine.sequence import Sequence

__all__ = ["plan_group"]


def plan_group(members: list[Sequence], max_chunk: int, block_manager: BlockManager) -> list[Growth]:
    """Return up to which token each of a group's unfinished sequences computes in this step.

    At most one sequence computes several tokens: the first with more than its last token to compute, here ``prefill``.
    The others decode or wait. The beams of a search wait until all of them can compute their last token in the same
    step, because the search compares their logits.

    Args:
        members: the sequences, in order.
        max_chunk: tokens that the first sequence with a prefill may compute, at most.
        block_manager: matches the prefix of that sequence if it has no blocks yet.
    """
    prefill = next((member for member in members if not _can_decode(member)), None)
    if prefill is None:
        return [
            Growth(member, member.num_computed_tokens if member.awaits_token else member.num_tokens)
            for member in members
        ]
    others_can_decode = all(member is prefill or _can_decode(member) for member in members)
    is_search = prefill.group.beams is not None
    match = None if prefill.block_table else block_manager.match_prefix(prefill)
    start = prefill.num_computed_tokens if match is None else match.num_resumed
    target = prefill.num_tokens - (is_search and not others_can_decode)  # a beam's last token waits for other prefills
    end = min(target, start + max_chunk)
    others_wait = is_search and end < prefill.num_tokens
    growths = []
    for member in members:
        if member is prefill:
            growths.append(Growth(member, end, match))
        else:
            decodes = _can_decode(member) and not others_wait and not member.awaits_token
            growths.append(Growth(member, member.num_computed_tokens + decodes))
    return growths


def _can_decode(sequence: Sequence) -> bool:
    """Whether only the last token of a sequence remains to be computed."""
    return sequence.remaining_tokens == 1 and bool(sequence.block_table)
