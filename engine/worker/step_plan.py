"""One step's batch: StepPlan holds it as arrays on the host, for every rank; ModelInput as tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.device_copy import to_device
from engine.kv.block_manager import BlockPair
from engine.scheduling.scheduler_output import SchedulerOutput
from kernels.attention_metadata import AttentionMetadata

__all__ = ["ModelInput", "StepPlan", "build_step_plan"]


@dataclass(frozen=True)
class ModelInput:
    """What the model computes in one step."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    logit_indices: torch.Tensor  # int64 [num_sampled + num_draft_tokens]: tokens whose logits the sampler needs
    prompt_logit_indices: torch.Tensor  # int64 [n]: prompt tokens whose logits give the next one's log-probability


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as every rank computes it. Arrays, because lists would pickle slower."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_indices: npt.NDArray[np.int64]  # into token_ids: of the sequences that sample, then of the draft tokens
    prompt_logit_indices: npt.NDArray[np.int64]  # into token_ids: see ModelInput; in batch order
    max_query_len: int
    max_seq_len: int
    # Copies of blocks, in this order, before the forward pass.
    swap_out: list[BlockPair]
    swap_in: list[BlockPair]
    block_copies: list[BlockPair]

    def to_device(self, device: torch.device) -> ModelInput:
        """Copy the arrays to a device."""

        def tensor(values: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(values, None, device)

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
            logit_indices=tensor(self.logit_indices),
            prompt_logit_indices=tensor(self.prompt_logit_indices),
        )


def build_step_plan(output: SchedulerOutput, block_size: int) -> StepPlan:
    """Pack the scheduled tokens of all sequences, in batch order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    prompt_logit_indices: list[int] = []
    drafts = output.drafts
    tables = [sequence.block_table for sequence in output.sequences]
    for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
        start, table = sequence.num_computed_tokens, sequence.block_table
        first_index = len(token_ids)
        token_ids += sequence.token_ids[start : start + count]
        if drafts and sequence in drafts:
            token_ids += drafts[sequence]
        positions += range(start, start + count)
        # Tokens of the prefix match are not written again: their blocks may be shared.
        written = sequence.num_matched_tokens
        slots += [
            table[position // block_size] * block_size + position % block_size if position >= written else -1
            for position in range(start, start + count)
        ]
        cu_seqlens.append(len(token_ids))
        if sequence.group.wants_prompt_logprobs:
            known = sequence.group.prompt_logprob_positions(start, start + count)
            prompt_logit_indices += [first_index + position - start for position in known]
    block_tables = np.full((len(tables), max(map(len, tables), default=0)), -1, dtype=np.int32)
    for index, table in enumerate(tables):
        block_tables[index, : len(table)] = table
    logit_indices = [cu_seqlens[index + 1] - 1 for index in output.logit_indices]
    if drafts:
        logit_indices = _logit_indices_with_drafts(output, cu_seqlens)
    seq_lens = [one.num_computed_tokens + n for one, n in zip(output.sequences, output.num_new_tokens, strict=True)]
    return StepPlan(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        cu_seqlens_q=np.array(cu_seqlens, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_tables=block_tables,
        logit_indices=np.array(logit_indices, dtype=np.int64),
        prompt_logit_indices=np.array(prompt_logit_indices, dtype=np.int64),
        max_query_len=max(output.num_new_tokens, default=0),
        max_seq_len=max(seq_lens, default=0),
        swap_out=output.swap_out,
        swap_in=output.swap_in,
        block_copies=output.block_copies,
    )


def _logit_indices_with_drafts(output: SchedulerOutput, cu_seqlens: list[int]) -> list[int]:
    """Return the index of each sampling sequence's last known token, then those of the draft tokens, in batch order."""
    lengths = [len(output.drafts.get(sequence, ())) for sequence in output.sequences]
    indices = [cu_seqlens[index + 1] - 1 - lengths[index] for index in output.logit_indices]
    for end, length in zip(cu_seqlens[1:], lengths, strict=True):
        indices += range(end - length, end)
    return indices
