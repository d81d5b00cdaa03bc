"""Drafter: which sequences compute guessed tokens in a step, and which of the guesses turn out right.

A sequence's next tokens are guessed (its draft) and computed in one step behind its last known token. The model then
says what it would have put behind each of them:

    known, last   | draft                    the likeliest token behind each row
    ... t         | a    b    c    d         t -> a,  a -> b,  b -> x,  c -> ?,  d -> ?

``a`` and ``b`` are what it would have said itself; ``x`` is what follows them, so this step gives a, b and x. The slots
of c and d hold K and V of tokens that are not the sequence's: they are overwritten when it gets there, and no block is
published before its tokens are known. Where the likeliest token is taken anyway, the answer is the same as without
drafts. This is speculative decoding (Leviathan et al., 2023) at temperature 0.

Drafts take what nobody else wants: tokens that the budget has left, and blocks that nobody in the batch needs for its
next step. What a draft has not used of its blocks is given back at the end of the step. This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Protocol

from engine.kv.block_manager import BlockManager
from engine.scheduling.step import SampledTokens, SchedulerOutput
from engine.sequence import Sequence

__all__ = ["Drafter", "Proposer", "Room", "confirmed_tokens"]


class Proposer(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens, or none."""


@dataclass(slots=True)
class Room:
    """What a step has left for drafts."""

    num_tokens: int
    num_blocks: int
    longest: int  # draft of one sequence


class Drafter:
    """Adds drafts to the batches of one scheduler.

    Args:
        block_manager: the pool that drafts draw on.
        proposer: guesses the tokens.
        num_tokens: of one draft, at most.
    """

    def __init__(self, block_manager: BlockManager, proposer: Proposer, num_tokens: int) -> None:
        self.proposer = proposer
        self.num_tokens = num_tokens
        self._blocks = block_manager

    def draft(
        self, running: list[Sequence], counts: list[int], partial: set[int], room: Room
    ) -> dict[Sequence, list[int]]:
        """Return drafts for a batch that is complete otherwise, in its order, with their blocks allocated.

        Args:
            running: the batch.
            counts: how many tokens each computes; a draft adds its own.
            partial: places of those that sample nothing in this step.
            room: what the drafts may take together.
        """
        drafts: dict[Sequence, list[int]] = {}
        for place, sequence in enumerate(running):
            if counts[place] != 1 or place in partial or not sequence.is_plain_greedy:
                continue
            # The step gives a token more than the draft has, and the last one of an answer is never computed.
            to_the_end = sequence.max_total_tokens - sequence.num_tokens - 1
            limit = min(self.num_tokens, room.num_tokens, room.longest, to_the_end)
            draft = self._propose(sequence, limit, room) if limit > 0 else []
            if draft:
                drafts[sequence] = draft
                counts[place] += len(draft)
        return drafts

    def _propose(self, sequence: Sequence, limit: int, room: Room) -> list[int]:
        """Return a draft that has room, which it takes."""
        blocks, known = self._blocks, sequence.num_tokens
        slots = (len(sequence.block_table) + max(0, room.num_blocks)) * blocks.block_size - known
        draft = self.proposer.propose(sequence, limit)[:slots]
        if draft:
            room.num_blocks -= blocks.extend(sequence, known + len(draft))
            room.num_tokens -= len(draft)
        return draft

    def settle(self, output: SchedulerOutput, sampled: SampledTokens) -> list[Sequence]:
        """Give the sequences what their drafts have got right, behind the token that each has got already.

        Returns:
            Those that end with it.
        """
        ended = []
        for sequence, draft in output.drafts.items():
            goes_on = not sequence.is_finished
            gained = _append_confirmed(sequence, draft, sampled.after_drafts[sequence]) if goes_on else 0
            output.num_accepted[sequence] = gained
            sequence.num_computed_tokens -= len(draft) - gained
            self._blocks.take_back(sequence)
            if goes_on and sequence.is_finished:
                ended.append(sequence)
        return ended


def _append_confirmed(sequence: Sequence, draft: list[int], behind: Sequence_[int]) -> int:
    """Append to the sequence what is right, until it ends; return how many tokens that is."""
    gained = 0
    for token_id in confirmed_tokens(sequence.token_ids[-1], draft, behind):
        sequence.token_ids.append(token_id)
        gained += 1
        sequence.check_end(token_id)
        if sequence.is_finished:
            break
    return gained


def confirmed_tokens(token_id: int, draft: list[int], behind: Sequence_[int]) -> Iterator[int]:
    """Yield what follows ``token_id``, by which the draft may begin, if the model takes the likeliest tokens.

    Args:
        token_id: what the model has said where the draft begins.
        draft: the guesses.
        behind: what the model says behind each of them; it may be cut short where it says nothing.
    """
    for guess, following in zip(draft, behind, strict=False):
        if guess != token_id:
            return
        yield following
        token_id = following
