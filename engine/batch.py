"""ModelInput: one step's batch as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.scheduler import SchedulerOutput
from kernels.attention import AttentionMetadata

__all__ = ["ModelInput", "build_model_input"]


@dataclass(frozen=True)
class ModelInput:
    """What the model computes in one step."""

    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata
    sampled_rows: torch.Tensor  # int64 [num_sampled]: rows whose logits are needed


def build_model_input(output: SchedulerOutput, block_size: int, device: torch.device) -> ModelInput:
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

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        return on_host.to(device, non_blocking=True)

    return ModelInput(
        token_ids=tensor(token_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        metadata=AttentionMetadata(
            slot_mapping=tensor(slots, torch.int64),
            cu_seqlens_q=tensor(cu_seqlens, torch.int32),
            seq_lens=tensor(seq_lens, torch.int32),
            block_tables=tensor([table + [-1] * (width - len(table)) for table in tables], torch.int32),
            max_query_len=max(item.num_new_tokens for item in output.scheduled),
            max_seq_len=max(seq_lens),
        ),
        sampled_rows=tensor(sampled_rows, torch.int64),
    )
