"""StepPlan: one step's batch as arrays on the host, which every rank gets; ModelInput: as tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
    """Everything that a rank must know to compute one step. Arrays pickle as fast as memory is copied, lists do not."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    sampled_rows: npt.NDArray[np.int64]
    max_query_len: int
    max_seq_len: int

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
            sampled_rows=tensor(self.sampled_rows),
        )


def build_step_plan(output: SchedulerOutput, block_size: int) -> StepPlan:
    """Pack the scheduled tokens, in batch order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens, seq_lens, sampled_rows = [0], [], []
    tables = [item.sequence.block_table for item in output.scheduled]
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
    width = max(map(len, tables))
    return StepPlan(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        cu_seqlens_q=np.array(cu_seqlens, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        block_tables=np.array([table + [-1] * (width - len(table)) for table in tables], np.int32),
        sampled_rows=np.array(sampled_rows, np.int64),
        max_query_len=max(item.num_new_tokens for item in output.scheduled),
        max_seq_len=max(seq_lens),
    )
