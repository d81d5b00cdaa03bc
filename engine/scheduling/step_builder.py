"""StepBuilder: the batch of one step while it is put together.

It owns the token budget and the number of tokens that each running sequence computes. The scheduler, admission,
preemption and the drafter change them; ``build`` returns the SchedulerOutput.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.attachments.window_pages import NO_CHANGES
from engine.kv.growth import Growth
from engine.kv.prefix_cache import PrefixMatch
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence, SequenceGroup

__all__ = ["StepBuilder"]


class StepBuilder:
    """One step under construction.

    Every running sequence begins with one token to compute, which is all that a steady decode needs.

    Args:
        queues: the running batch; requests that start or are preempted change it.
        max_step_tokens: tokens of the step, at most.
        chunk_limit: tokens of one sequence in the step, at most.

    Attributes:
        token_budget: tokens left, beyond the one that is reserved for every used slot of the batch.
        num_new_tokens: tokens that each running sequence computes.
        not_sampling: indices of the running sequences that sample no token in this step.
        output: copies, swaps and changes of the queues so far.
    """

    __slots__ = (
        "_blocks",
        "_queues",
        "chunk_limit",
        "not_sampling",
        "num_new_tokens",
        "output",
        "running",
        "token_budget",
    )

    def __init__(self, queues: RequestQueues, max_step_tokens: int, chunk_limit: int) -> None:
        self.running = queues.running
        self.token_budget = max_step_tokens - queues.num_used_slots
        self.chunk_limit = chunk_limit
        self.num_new_tokens = [1] * len(queues.running)
        self.not_sampling: set[int] = set()
        self.output = SchedulerOutput()
        self._queues = queues
        self._blocks = queues.block_manager

    def max_chunk(self, num_slots: int = 0) -> int:
        """Return how many tokens one sequence may compute if ``num_slots`` further slots are reserved."""
        return min(1 + max(0, self.token_budget - num_slots), self.chunk_limit)

    def start(self, group: SequenceGroup, growths: list[Growth]) -> range:
        """Move a waiting group to the batch and allocate what was planned for it; return its indices in the batch."""
        self.token_budget -= group.num_slots
        first = self._queues.start(group)
        num_members = len(growths)
        self.num_new_tokens[first:first] = [1] * num_members
        self.not_sampling = {index + num_members if index >= first else index for index in self.not_sampling}
        self.compute(growths, first)
        self.output.admitted.append(group)
        return range(first, first + num_members)

    def compute(self, growths: list[Growth], first: int) -> None:
        """Allocate blocks for the plan of a group whose sequences are in the batch from index ``first`` on."""
        for growth in growths:
            if growth.match is not None:  # before another sequence's allocation evicts the matched blocks
                self._take_prefix(growth.sequence, growth.match)
        for index, growth in enumerate(growths, first):
            sequence, end = growth.sequence, growth.end
            num_new = end - sequence.num_computed_tokens
            self.num_new_tokens[index] = num_new
            if num_new and (block_copy := self._blocks.allocate(sequence, end)):
                self.output.block_copies.on_device.append(block_copy)
            if end < sequence.num_tokens or not num_new:
                self.not_sampling.add(index)
            self.token_budget -= max(num_new - 1, 0)

    def _take_prefix(self, sequence: Sequence, match: PrefixMatch) -> None:
        self._blocks.take_prefix(sequence, match)
        if not sequence.group.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)

    def add_draft(self, index: int, draft: list[int], continuations: list[Sequence], proposer: str) -> None:
        """Let a sequence compute draft tokens after its last token, and sample after each of them."""
        sequence = self.running[index]
        self.output.drafts[sequence] = draft
        self.output.continuations[sequence] = continuations
        self.output.proposers[sequence] = proposer
        self.num_new_tokens[index] += len(draft)
        self.token_budget -= len(draft)

    def leave_idle(self, index: int) -> None:
        """Let the sequence at this index of the batch compute nothing."""
        self.num_new_tokens[index] = 0
        self.not_sampling.add(index)

    def remove_preempted(self, group: SequenceGroup) -> None:
        """Remove a group that has left the running batch, where it was the last one."""
        del self.num_new_tokens[len(self.running) :]
        self.output.preempted.append(group)

    def max_blocks_needed(self) -> int:
        """Return an upper bound of ``num_blocks_needed`` for the whole batch: a decode needs at most one block."""
        return len(self.running) + self.num_blocks_needed(self.not_sampling)

    def num_blocks_needed(self, indices: Iterable[int]) -> int:
        """Return how many blocks these sequences still need for all their known tokens and the next one."""
        needed = 0
        for index in indices:
            sequence = self.running[index]
            num_tokens = max(sequence.num_tokens, sequence.num_computed_tokens + self.num_new_tokens[index] + 1)
            needed += max(0, self._blocks.num_blocks_for(num_tokens) - len(sequence.block_table))
        return needed

    def build(self) -> SchedulerOutput:
        """Return the step. Groups whose prompt it completes are forked."""
        output = self.output
        output.block_copies.swap_out, output.block_copies.swap_in = self._blocks.host_pool.take_copies()
        if self._blocks.states is not None:
            output.state_copies, output.state_saves = self._blocks.states.take_copies()
        output.sequences, output.num_new_tokens = self.running.copy(), self.num_new_tokens
        output.sampling, output.logit_indices = output.sequences, range(len(output.sequences))
        may_fork = len(self.running) < self._queues.num_used_slots
        has_idle = 0 in self.num_new_tokens
        if may_fork or has_idle:
            self._sample_with_forks()
        elif self.not_sampling:
            self._leave_out_not_sampling()
        if has_idle:
            self._leave_out_idle()
        for window in self._blocks.windows:  # no rank learns of the pages of a step that computes nothing
            output.window_changes.append(window.take_changes() if output.sequences else NO_CHANGES)
            output.window_copies.append(window.attached.take_copies())
        return output

    def _leave_out_not_sampling(self) -> None:
        """Remove the sequences that sample no token. Copying the lists and deleting from them is faster than a loop."""
        sampling, logit_indices = self.running.copy(), list(range(len(self.running)))
        for index in sorted(self.not_sampling, reverse=True):
            del sampling[index], logit_indices[index]
        self.output.sampling, self.output.logit_indices = sampling, logit_indices

    def _sample_with_forks(self) -> None:
        """Fork the groups that sample for the first time; a fork samples from the logits of its group's prompt."""
        output = self.output
        sampling: list[Sequence] = []
        logit_indices: list[int] = []
        num_computing = 0
        for index, sequence in enumerate(self.running):
            if index not in self.not_sampling:
                group = sequence.group
                forks = [] if group.is_forked or group.beams else group.fork()
                output.forks += forks
                sampling += [sequence, *forks]
                logit_indices += [num_computing] * (1 + len(forks))
            num_computing += self.num_new_tokens[index] > 0
        output.sampling, output.logit_indices = sampling, logit_indices

    def _leave_out_idle(self) -> None:
        """Remove the sequences that compute nothing: they wait for others of their group, for a token or a block."""
        pairs = [pair for pair in zip(self.running, self.num_new_tokens, strict=True) if pair[1]]
        self.output.sequences = [sequence for sequence, _ in pairs]
        self.output.num_new_tokens = [num_new for _, num_new in pairs]
