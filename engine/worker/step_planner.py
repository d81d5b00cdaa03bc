"""StepPlanner: packs each scheduled batch into a StepPlan, on rank 0.

What it does for a sequence that decodes step after step is a few array operations for all of them together: block
tables stay on the ranks, and only their changes are sent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.kv.block_tables import TableTracker
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from engine.worker.step_plan import StepPlan

__all__ = ["StepPlanner"]

_Ids = npt.NDArray[np.int64]


class StepPlanner:
    """Makes the plans of one engine's steps. The ranks must execute every plan, in order.

    Args:
        block_size: tokens per block.
        num_rows: sequences in a batch, at most.
        max_blocks: blocks of a sequence, at most.
    """

    def __init__(self, block_size: int, num_rows: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._tracker = TableTracker(num_rows, max_blocks)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Pack the scheduled tokens of all sequences, in batch order."""
        sequences = output.sequences
        num_new = np.array(output.num_new_tokens, dtype=np.int64)
        starts = np.array([sequence.num_computed_tokens for sequence in sequences], dtype=np.int64)
        table_rows, changes = self._tracker.update([sequence.block_table for sequence in sequences])
        cu_seqlens = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(num_new, out=cu_seqlens[1:])
        positions, slots = self._slots(sequences, starts, num_new, cu_seqlens, table_rows)
        seq_lens = starts + num_new
        logit_indices = cu_seqlens[1:] - 1
        if output.drafts:
            logit_indices = _logit_indices_with_drafts(output, cu_seqlens)
            self._expect_rejected_drafts(output, seq_lens)
        elif output.logit_indices != range(len(sequences)):
            logit_indices = logit_indices[np.array(output.logit_indices, dtype=np.int64)]
        return StepPlan(
            token_ids=np.array(_token_ids(output), dtype=np.int64),
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=cu_seqlens.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            table_rows=table_rows,
            table_changes=changes,
            logit_indices=logit_indices,
            prompt_logit_indices=_prompt_logit_indices(output, cu_seqlens),
            max_query_len=max(output.num_new_tokens, default=0),
            max_seq_len=int(seq_lens.max(initial=0)),
            swap_out=output.swap_out,
            swap_in=output.swap_in,
            block_copies=output.block_copies,
        )

    def _slots(
        self, sequences: list[Sequence], starts: _Ids, num_new: _Ids, cu_seqlens: _Ids, table_rows: _Ids
    ) -> tuple[_Ids, _Ids]:
        """Return the position of each token in its sequence, and the slot of the KV cache that it is written to."""
        # Tokens of the prefix match are not written again: their blocks may be shared.
        num_matched = np.array([sequence.num_matched_tokens for sequence in sequences], dtype=np.int64)
        positions, rows = starts, table_rows
        num_tokens = int(cu_seqlens[-1])
        if num_tokens > len(sequences):
            owners = np.repeat(np.arange(len(sequences)), num_new)  # index of each token's sequence
            positions = np.arange(num_tokens) + (starts - cu_seqlens[:-1])[owners]
            rows, num_matched = table_rows[owners], num_matched[owners]
        indices, offsets = np.divmod(positions, self._block_size)
        slots = self._tracker.array[rows, indices].astype(np.int64) * self._block_size + offsets
        slots[positions < num_matched] = -1
        return positions, slots

    def _expect_rejected_drafts(self, output: SchedulerOutput, seq_lens: _Ids) -> None:
        """Prepare for the blocks that hold only draft tokens, some of which are freed after the step."""
        for position, sequence in enumerate(output.sequences):
            if draft := output.drafts.get(sequence):
                num_tokens = int(seq_lens[position]) - len(draft)
                self._tracker.expect_removal(position, -(-num_tokens // self._block_size))


def _token_ids(output: SchedulerOutput) -> list[int]:
    if len(output.sequences) == output.num_tokens:
        return [sequence.token_ids[sequence.num_computed_tokens] for sequence in output.sequences]
    token_ids: list[int] = []
    for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
        start = sequence.num_computed_tokens
        token_ids += sequence.token_ids[start : start + count]
        if output.drafts:
            token_ids += output.drafts.get(sequence, ())
    return token_ids


def _prompt_logit_indices(output: SchedulerOutput, cu_seqlens: _Ids) -> _Ids:
    indices: list[int] = []
    wanted = [i for i, sequence in enumerate(output.sequences) if sequence.params.prompt_logprobs is not None]
    for i in wanted:
        sequence, first_index = output.sequences[i], int(cu_seqlens[i])
        start = sequence.num_computed_tokens
        known = sequence.group.prompt_logprob_positions(start, start + output.num_new_tokens[i])
        indices += [first_index + position - start for position in known]
    return np.array(indices, dtype=np.int64)


def _logit_indices_with_drafts(output: SchedulerOutput, cu_seqlens: _Ids) -> _Ids:
    """Return the index of each sampling sequence's last known token, then those of the draft tokens, in batch order."""
    ends = cu_seqlens[1:].tolist()
    lengths = [len(output.drafts.get(sequence, ())) for sequence in output.sequences]
    indices = [ends[index] - 1 - lengths[index] for index in output.logit_indices]
    for end, length in zip(ends, lengths, strict=True):
        indices += range(end - length, end)
    return np.array(indices, dtype=np.int64)
