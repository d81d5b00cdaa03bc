"""StepPlan: one step's batch as plain data, which every rank gets; ModelInput: the same as tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.scheduler import SchedulerOutput
from kernels.attention import AttentionMetadata

__all__ = ["ModelInput", "StepPlan", "build_step_plan"]


@dataclass(frozen=True)
class ModelInput:
    """What the model computes in one step."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    sampled_rows: torch.Tensor  # int64 [num_sampled]: rows whose logits are needed


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a rank must know to compute one step. It pickles small and without tensors."""

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]  # where each token's keys and values go; -1: nowhere
    cu_seqlens_q: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]  # of unequal lengths
    max_query_len: int
    sampled_rows: list[int]

    def to_device(self, device: torch.device) -> ModelInput:
        """Make the tensors."""

        def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
            on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
            return on_host.to(device, non_blocking=True)

        width = max(map(len, self.block_tables))
        tables = [table + [-1] * (width - len(table)) for table in self.block_tables]
        return ModelInput(
            token_ids=tensor(self.token_ids, torch.int64),
            positions=tensor(self.positions, torch.int64),
            metadata=AttentionMetadata(
                slot_mapping=tensor(self.slot_mapping, torch.int64),
                cu_seqlens_q=tensor(self.cu_seqlens_q, torch.int32),
                seq_lens=tensor(self.seq_lens, torch.int32),
                block_tables=tensor(tables, torch.int32),
                max_query_len=self.max_query_len,
                max_seq_len=max(self.seq_lens),
            ),
            sampled_rows=tensor(self.sampled_rows, torch.int64),
        )


def build_step_plan(output: SchedulerOutput, block_size: int) -> StepPlan:
    """Pack the scheduled tokens, in batch order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens, seq_lens, sampled_rows = [0], [], []
    for item in output.scheduled:
        sequence, table = item.sequence, item.sequence.block_table
        token_ids += sequence.token_ids[item.start : item.end]
        positions += range(item.start, item.end)
        # What the prefix cache already holds is not written again: its blocks may be shared.
        slots += [
            table[position // block_size] * block_size + position % block_size
            if position >= sequence.num_kv_tokens
            else -1
            for position in range(item.start, item.end)
        ]
        cu_seqlens.append(len(token_ids))
        seq_lens.append(item.end)
        if item.samples:
            sampled_rows.append(len(token_ids) - 1)
    return StepPlan(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens,
        seq_lens=seq_lens,
        block_tables=[item.sequence.block_table for item in output.scheduled],
        max_query_len=max(item.num_new_tokens for item in output.scheduled),
        sampled_rows=sampled_rows,
    )
