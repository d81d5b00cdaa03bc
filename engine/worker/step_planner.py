"""StepPlanner: packs each scheduled batch into a StepPlan, on rank 0.

Sequences that decode step after step take a few array operations for all of them together: block tables stay on the
ranks, and only their changes are sent.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kv.block_tables import TableTracker
from engine.kv.page_maps import HostPageMap
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence
from engine.worker.step_plan import RecurrentPlan, StepPlan, WindowPlan

__all__ = ["StepPlanner"]

_Ids = npt.NDArray[np.int64]


class StepPlanner:
    """Makes the plans of one engine's steps. The ranks must execute every plan, in order.

    Args:
        block_size: tokens per block.
        num_rows: sequences in a batch, at most.
        max_blocks: blocks of a sequence, at most.
        page_maps: of each sliding window of the model.
        has_states: whether the model has recurrent layers.
    """

    def __init__(
        self,
        block_size: int,
        num_rows: int,
        max_blocks: int,
        *,
        page_maps: GenericSequence[HostPageMap] = (),
        has_states: bool = False,
    ) -> None:
        self._block_size = block_size
        self._page_maps = page_maps
        self._has_states = has_states
        self._tracker = TableTracker(num_rows, max_blocks)
        self._last_sampling: list[Sequence] = []  # the sequences that sample in the last planned step

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Pack the scheduled tokens of all sequences: decodes first, otherwise in batch order."""
        table_rows, changes = self._tracker.update([sequence.block_table for sequence in output.sequences])
        if output.drafts:
            self._expect_rejected_drafts(output)
        batch = _Batch.of(output)
        if batch.order is not None:
            table_rows = table_rows[batch.order]
        positions, slots = self._slots(batch, table_rows)
        seq_lens = batch.starts + batch.num_new
        token_ids, num_pending = batch.token_ids(output, self._last_sampling)
        self._last_sampling = output.sampling
        return StepPlan(
            token_ids=np.array(token_ids, dtype=np.int64),
            num_pending=num_pending,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=batch.cu_seqlens.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            table_rows=table_rows,
            table_changes=changes,
            logit_indices=_logit_indices(output, batch.ends),
            prompt_logit_indices=_prompt_logit_indices(output, batch.ends),
            num_decodes=batch.num_decodes,
            max_query_len=max(output.num_new_tokens, default=0),
            max_seq_len=int(seq_lens.max()) if len(seq_lens) else 0,
            copies=output.copies,
            windows=self._windows(output, slots),
            recurrent=_recurrent_plan(output, batch) if self._has_states else None,
        )

    def forget_ranks(self) -> None:
        """Plan the next step for ranks that may not have executed the last plan, as after an error."""
        self._tracker.forget()
        for page_map in self._page_maps:
            page_map.forget()
        self._last_sampling = []

    def _slots(self, batch: _Batch, table_rows: _Ids) -> tuple[_Ids, _Ids]:
        """Return the position of each token in its sequence, and the slot of the KV cache that it is written to."""
        positions, rows = batch.starts, table_rows
        if batch.num_decodes < len(batch.sequences):
            owners = np.repeat(np.arange(len(batch.sequences)), batch.num_new)  # index of each token's sequence
            positions = np.arange(len(owners)) + (batch.starts - batch.cu_seqlens[:-1])[owners]
            rows = table_rows[owners]
        indices = positions // self._block_size
        block_ids = self._tracker.array[rows, indices].astype(np.int64)
        slots = positions + (block_ids - indices) * self._block_size
        # Tokens of the prefix match are not written again: their blocks may be shared.
        for index, sequence in enumerate(batch.sequences):
            if (num_rewritten := sequence.num_matched_tokens - sequence.num_computed_tokens) > 0:
                first, end = batch.cu_seqlens[index : index + 2]
                slots[first : min(first + num_rewritten, end)] = -1
        return positions, slots

    def _windows(self, output: SchedulerOutput, slots: _Ids) -> list[WindowPlan]:
        """Return what the step does with the pages of each window."""
        return [
            WindowPlan(page_map.slots(slots, self._block_size), *changes)
            for page_map, changes in [
                (page_map, page_map.update(*changes))
                for page_map, changes in zip(self._page_maps, output.window_changes, strict=True)
            ]
        ]

    def _expect_rejected_drafts(self, output: SchedulerOutput) -> None:
        """Prepare for the blocks that hold only draft tokens, some of which are freed after the step."""
        for position, sequence in enumerate(output.sequences):
            if sequence in output.drafts:
                self._tracker.expect_removal(position, -(-sequence.num_tokens // self._block_size))


class _Batch(NamedTuple):
    """The sequences of a step as they are packed."""

    sequences: list[Sequence]
    order: _Ids | None  # the index of each in the scheduler's order; None: the same
    num_decodes: int
    num_new: _Ids  # [num_seqs]
    starts: _Ids  # [num_seqs]: the position of each one's first token
    cu_seqlens: _Ids  # [num_seqs + 1]
    ends: _Ids  # [num_seqs], in the scheduler's order: the index after each one's last token

    @classmethod
    def of(cls, output: SchedulerOutput) -> _Batch:
        counts, sequences, order = output.num_new_tokens, output.sequences, None
        num_new = np.array(counts, dtype=np.int64)
        starts = np.array([sequence.num_computed_tokens for sequence in sequences], dtype=np.int64)
        prompt_lens = np.array([sequence.num_prompt_tokens for sequence in sequences], dtype=np.int64)
        # A chunk of one prompt token is not a decode: the kernels of decodes add in another order than those of chunks,
        # and where a prompt's chunks end depends on what else the steps compute.
        is_decode = (num_new == 1) & (starts >= prompt_lens)
        num_decodes = int(is_decode.sum())
        if not is_decode[:num_decodes].all():
            order = np.argsort(~is_decode, kind="stable")
            num_new, starts, sequences = num_new[order], starts[order], [sequences[index] for index in order.tolist()]
        cu_seqlens = np.arange(len(counts) + 1)
        if num_decodes < len(counts):
            np.cumsum(num_new, out=cu_seqlens[1:])
        ends = cu_seqlens[1:]
        if order is not None:
            ends = np.empty_like(ends)
            ends[order] = cu_seqlens[1:]
        return cls(sequences, order, num_decodes, num_new, starts, cu_seqlens, ends)

    def token_ids(self, output: SchedulerOutput, last_sampling: list[Sequence]) -> tuple[list[int], int]:
        """Return StepPlan's token ids and the number of pending ones, given what sampled in the last step."""
        decodes = self.sequences[: self.num_decodes]
        num_pending = sum(sequence.num_pending for sequence in decodes)
        if num_pending:
            token_ids = _pending_ids(decodes, last_sampling)
        else:
            token_ids = [sequence.token_ids[sequence.num_computed_tokens] for sequence in decodes]
        counts = self.num_new[self.num_decodes :].tolist()
        for sequence, count in zip(self.sequences[self.num_decodes :], counts, strict=True):
            start = sequence.num_computed_tokens
            token_ids += sequence.token_ids[start : start + count]
            token_ids += output.drafts.get(sequence, ())
        return token_ids, num_pending


def _pending_ids(decodes: list[Sequence], last_sampling: list[Sequence]) -> list[int]:
    """Return the token id of each decode, or ~index if it is the pending one of that index in the last step."""
    if decodes == last_sampling and all(sequence.num_pending for sequence in decodes):  # nearly always
        return list(range(-1, -1 - len(decodes), -1))
    index_of = {sequence: index for index, sequence in enumerate(last_sampling)}
    return [
        ~index_of[decode] if decode.num_pending else decode.token_ids[decode.num_computed_tokens] for decode in decodes
    ]


def _recurrent_plan(output: SchedulerOutput, batch: _Batch) -> RecurrentPlan:
    """Return where the states of the batch are, and which of them are saved after which token."""
    saves: list[tuple[int, int]] = []
    for index, sequence in enumerate(batch.sequences):
        if sequence in output.state_saves:
            offset = int(batch.cu_seqlens[index] - batch.starts[index]) - 1  # from tokens seen to the last one's index
            saves += [(offset + num_tokens, slot) for num_tokens, slot in output.state_saves[sequence]]
    return RecurrentPlan(
        slots=np.array([sequence.state_slot for sequence in batch.sequences], dtype=np.int32),
        starts=(batch.starts == 0).astype(np.int32),
        save_tokens=np.array([token for token, _ in saves], dtype=np.int32),
        save_slots=np.array([slot for _, slot in saves], dtype=np.int32),
    )


def _prompt_logit_indices(output: SchedulerOutput, ends: _Ids) -> _Ids:
    indices: list[int] = []
    wanted = [i for i, sequence in enumerate(output.sequences) if sequence.params.prompt_logprobs is not None]
    for i in wanted:
        sequence, count = output.sequences[i], output.num_new_tokens[i]
        start = sequence.num_computed_tokens
        first_index = int(ends[i]) - count
        known = sequence.group.prompt_logprob_positions(start, start + count)
        indices += [first_index + position - start for position in known]
    return np.array(indices, dtype=np.int64)


def _logit_indices(output: SchedulerOutput, ends: _Ids) -> _Ids:
    """Return the index of each sampling sequence's last known token, then those of the draft tokens, in batch order."""
    if not output.drafts:
        is_whole_batch = output.logit_indices == range(len(ends))
        return ends - 1 if is_whole_batch else ends[np.array(output.logit_indices, dtype=np.int64)] - 1
    lengths = [len(output.drafts.get(sequence, ())) for sequence in output.sequences]
    last_known = ends - 1 - np.array(lengths, dtype=np.int64)
    indices = last_known[np.array(output.logit_indices, dtype=np.int64)].tolist()
    for end, length in zip(ends.tolist(), lengths, strict=True):
        indices += range(end - length, end)
    return np.array(indices, dtype=np.int64)
