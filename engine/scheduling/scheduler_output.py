"""SchedulerOutput and SampledTokens: what a step computes, and what it sampled.

The scheduler writes the first and reads the second; the model runner reads the first and writes the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field

from engine.kv.attachments.window_pages import PageChanges
from engine.kv.page_copies import PageCopies
from engine.outputs import TokenLogprobs
from engine.sampling.beam_search import Candidates
from engine.sequence import Sequence, SequenceGroup

__all__ = ["SampledTokens", "SchedulerOutput", "StepTimes"]


@dataclass(slots=True)
class SchedulerOutput:
    """The batch of one step. The runner first copies blocks, pages of windows and states."""

    sequences: list[Sequence] = field(default_factory=list)  # in batch order
    num_new_tokens: list[int] = field(default_factory=list)  # tokens that each computes, from num_computed_tokens on
    # Draft tokens that some sequences compute after their last token, in batch order; num_new_tokens includes them.
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    # Each sequence as it would be after its first, second, ... draft token: the sampler samples from these too.
    continuations: dict[Sequence, list[Sequence]] = field(default_factory=dict)
    proposers: dict[Sequence, str] = field(default_factory=dict)  # of each draft: who proposed it, by name
    drafting_seconds: dict[str, float] = field(default_factory=dict)  # that proposers took, by name
    draft_model_seconds: float = 0.0  # that a draft model took, whatever came of it
    # Tokens that each draft added to its sequence; set after the step, for sequences that it did not find ended.
    num_accepted: dict[Sequence, int] = field(default_factory=dict)
    sampling: list[Sequence] = field(default_factory=list)  # the sequences that sample a token
    logit_indices: GenericSequence[int] = ()  # for each of ``sampling``, the index in ``sequences`` of its logits
    forks: list[Sequence] = field(default_factory=list)  # new ones among ``sampling``; they join the batch afterwards
    block_copies: PageCopies = field(default_factory=PageCopies)
    window_copies: list[PageCopies] = field(default_factory=list)  # of each window
    state_copies: PageCopies = field(default_factory=PageCopies)
    # The snapshots that are written while the step computes: of each sequence the tokens that each has seen, its slot.
    state_saves: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)
    window_changes: list[PageChanges] = field(default_factory=list)  # for each window: blocks with another page now
    admitted: list[SequenceGroup] = field(default_factory=list)  # started in this step
    preempted: list[SequenceGroup] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)  # ended, since the pool cannot hold all answers of a request
    lacks_blocks: bool = False  # a sequence waits for blocks: no step may be in flight when the next one is scheduled
    # Those in the batch whose last token, now known, is not as the step assumed: it has ended them, or is another one.
    cancelled: set[Sequence] = field(default_factory=set)
    num_wasted: int = 0  # tokens that were sampled for sequences that had ended or were cancelled; set after the step

    @property
    def is_empty(self) -> bool:
        """Whether the step computes, copies and ends nothing."""
        return not (self.sequences or any(self.copies) or self.dropped)

    @property
    def copies(self) -> list[PageCopies]:
        """The copies of each pool: of blocks, of each window, and of states."""
        return [self.block_copies, *self.window_copies, self.state_copies]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(self.num_new_tokens)

    def drafts_by(self, proposer: str) -> dict[Sequence, tuple[int, int]]:
        """Return the accepted and the rejected tokens of each of a proposer's drafts; call it after the step."""
        return {
            sequence: (accepted, len(self.drafts[sequence]) - accepted)
            for sequence, accepted in self.num_accepted.items()
            if self.proposers.get(sequence) == proposer
        }

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens among them."""
        return sum(map(len, self.drafts.values()))


@dataclass(slots=True)
class SampledTokens:
    """What the ``sampling`` sequences of a step sampled, in their order."""

    token_ids: list[int]  # one each; ignored for beams and for sequences that failed
    logprobs: list[TokenLogprobs | None] | None = None  # None if no sequence wants them
    beams: dict[int, Candidates] = field(default_factory=dict)  # by position in ``sampling``
    failed: dict[int, str] = field(default_factory=dict)  # positions without a token to sample, and the reason
    prompt_logprobs: list[tuple[SequenceGroup, list[TokenLogprobs]]] = field(default_factory=list)
    # The token after each draft token, if the draft is right so far; shorter where the logits give none.
    after_drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    logprobs_after_drafts: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)  # where they are wanted
    resampled_on_host: list[int] = field(default_factory=list)  # positions whose token the host chose after the step

    def take_after_drafts(self, drafts: Mapping[Sequence, GenericSequence[int]]) -> None:
        """Move the last positions, which follow the draft tokens, to ``after_drafts``.

        Args:
            drafts: of the step, in batch order.
        """
        num_sampled = first = len(self.token_ids) - sum(map(len, drafts.values()))
        for sequence, draft in drafts.items():
            positions = range(first, first := first + len(draft))
            if self.failed:
                positions = range(positions.start, min(self.failed.keys() & positions, default=positions.stop))
            self.after_drafts[sequence] = self.token_ids[positions.start : positions.stop]
            if self.logprobs is not None and sequence.params.needs_logprobs:
                logprobs = self.logprobs[positions.start : positions.stop]
                self.logprobs_after_drafts[sequence] = [position for position in logprobs if position is not None]
        self.keep(list(range(num_sampled)))

    def keep(self, positions: list[int]) -> None:
        """Keep what these positions sampled, ascending, and drop all else."""
        new = {position: index for index, position in enumerate(positions)}
        self.token_ids = [self.token_ids[position] for position in positions]
        if self.logprobs is not None:
            self.logprobs = [self.logprobs[position] for position in positions]
        self.beams = {new[position]: candidates for position, candidates in self.beams.items() if position in new}
        self.failed = {new[position]: reason for position, reason in self.failed.items() if position in new}
        self.resampled_on_host = [new[position] for position in self.resampled_on_host if position in new]


@dataclass(slots=True)
class StepTimes:
    """Seconds that the phases of one step took."""

    schedule: float = 0.0
    draft: float = 0.0  # of a draft model
    forward: float = 0.0
    sample: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return self.schedule + self.draft + self.forward + self.sample
