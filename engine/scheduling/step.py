"""SchedulerOutput and SampledTokens: what a step is to compute, and what came of it.

The scheduler writes the first and reads the second; the runner in between does the opposite.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.beam_search import Candidates
from engine.kv.block_manager import BlockPair
from engine.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from engine.outputs import TokenLogprobs

__all__ = ["SampledTokens", "SchedulerOutput", "StepTimes"]


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch. The copies are made first: swap-outs, then swap-ins, then block copies."""

    sequences: list[Sequence] = field(default_factory=list)  # in batch order
    num_new_tokens: list[int] = field(default_factory=list)  # that each of them computes, from num_computed_tokens on
    # Guessed tokens that some of them compute behind their last one, in batch order; num_new_tokens counts them too.
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    num_accepted: dict[Sequence, int] = field(default_factory=dict)  # tokens that each draft gained, after the step
    sampling: list[Sequence] = field(default_factory=list)  # those that get a new token
    logit_indices: Sequence_[int] = ()  # for each of them, whose logits it samples from: an index into sequences
    forks: list[Sequence] = field(default_factory=list)  # those of ``sampling`` that join the batch after this step
    block_copies: list[BlockPair] = field(default_factory=list)
    swap_out: list[BlockPair] = field(default_factory=list)  # (block, host block)
    swap_in: list[BlockPair] = field(default_factory=list)  # (host block, block)
    admitted: list[SequenceGroup] = field(default_factory=list)  # left the queue in this step
    preempted: list[SequenceGroup] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)  # ended, since the pool cannot hold all answers of a request

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do or to tell."""
        return not (self.sequences or self.swap_out or self.swap_in or self.block_copies or self.dropped)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(self.num_new_tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Those of them that are guesses."""
        return sum(map(len, self.drafts.values()))


@dataclass(slots=True)
class SampledTokens:
    """What a step's ``sampling`` sequences got, in their order."""

    token_ids: list[int]  # one each; ignored for beams and where it failed
    logprobs: list[TokenLogprobs | None] | None = None  # None if nobody asks for them
    beams: dict[int, Candidates] = field(default_factory=dict)  # by position in ``sampling``
    failed: dict[int, str] = field(default_factory=dict)  # positions without a token to sample, and why
    prompt_logprobs: list[tuple[SequenceGroup, list[TokenLogprobs]]] = field(default_factory=list)
    # The likeliest token behind each token of a draft; cut short where there is none.
    after_drafts: dict[Sequence, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class StepTimes:
    """Seconds that the phases of one step took."""

    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
