"""StepPlan: one step's batch as arrays on the host, which every rank gets; ModelInput: as tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.block_manager import BlockPair
from engine.scheduling.step import SchedulerOutput
from kernels.attention import AttentionMetadata

__all__ = ["ModelInput", "StepPlan", "build_step_plan"]


@dataclass(frozen=True)
class ModelInput:
    """What the model computes in one step."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    logit_rows: torch.Tensor  # int64 [num_sampled + num_draft_tokens]: rows whose logits are wanted
    prompt_rows: torch.Tensor  # int64 [num_prompt_rows]: rows whose logits give prompt logprobs


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that a rank must know to compute one step. Arrays pickle as fast as memory is copied, lists do not."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]  # of the sequences that sample, then of their drafts
    prompt_rows: npt.NDArray[np.int64]  # of prompt tokens behind which a logprob is wanted, in batch order
    max_query_len: int
    max_seq_len: int
    # Copies of blocks, to be made in this order before anything is computed.
    swap_out: list[BlockPair]
    swap_in: list[BlockPair]
    block_copies: list[BlockPair]

    def to_device(self, device: torch.device) -> ModelInput:
        """Make the tensors."""

        def tensor(values: npt.NDArray[Any]) -> torch.Tensor:
            on_host = torch.from_numpy(values)
            return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host

        return ModelInput(
            token_ids=tensor(self.token_ids),
            positions=tensor(self.positions),
            metadata=AttentionMetadata(
                slot_mapping=tensor(self.slot_mapping),
                cu_seqlens_q=tensor(self.cu_seqlens_q),
                seq_lens=tensor(self.seq_lens),
                block_tables=tensor(self.block_tables),
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
            ),
            logit_rows=tensor(self.logit_rows),
            prompt_rows=tensor(self.prompt_rows),
        )


def build_step_plan(output: SchedulerOutput, block_size: int) -> StepPlan:
    """Pack the scheduled tokens, in batch order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    prompt_rows: list[int] = []
    drafts = output.drafts
    tables = [sequence.block_table for sequence in output.sequences]
    for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
        start, table = sequence.num_computed_tokens, sequence.block_table
        first_row = len(token_ids)
        token_ids += sequence.token_ids[start : start + count]
        if drafts and sequence in drafts:
            token_ids += drafts[sequence]
        positions += range(start, start + count)
        # What the prefix cache already holds is not written again: its blocks may be shared.
        written = sequence.num_matched_tokens
        slots += [
            table[position // block_size] * block_size + position % block_size if position >= written else -1
            for position in range(start, start + count)
        ]
        cu_seqlens.append(len(token_ids))
        if sequence.group.wants_prompt_logprobs:
            known = sequence.group.prompt_logprob_positions(start, start + count)
            prompt_rows += [first_row + position - start for position in known]
    block_tables = np.full((len(tables), max(map(len, tables), default=0)), -1, dtype=np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    sampled_rows = [cu_seqlens[row + 1] - 1 for row in output.logit_indices]
    if drafts:
        sampled_rows = _rows_with_drafts(output, cu_seqlens)
    seq_lens = [one.num_computed_tokens + n for one, n in zip(output.sequences, output.num_new_tokens, strict=True)]
    return StepPlan(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        cu_seqlens_q=np.array(cu_seqlens, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_tables=block_tables,
        logit_rows=np.array(sampled_rows, dtype=np.int64),
        prompt_rows=np.array(prompt_rows, dtype=np.int64),
        max_query_len=max(output.num_new_tokens, default=0),
        max_seq_len=max(seq_lens, default=0),
        swap_out=output.swap_out,
        swap_in=output.swap_in,
        block_copies=output.block_copies,
    )


def _rows_with_drafts(output: SchedulerOutput, cu_seqlens: list[int]) -> list[int]:
    """Return the row of each sampling sequence's last known token, then those of the drafts, in batch order."""
    lengths = [len(output.drafts.get(sequence, ())) for sequence in output.sequences]
    rows = [cu_seqlens[row + 1] - 1 - lengths[row] for row in output.logit_indices]
    for end, length in zip(cu_seqlens[1:], lengths, strict=True):
        rows += range(end - length, end)
    return rows
