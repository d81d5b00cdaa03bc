"""The warm-up step: the largest batch that the scheduler can build, run once to measure the peak of GPU memory."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.worker.step_plan import ModelInput
from kernels.attention_metadata import AttentionMetadata

__all__ = ["warm_up_input"]


def warm_up_input(
    config: EngineConfig, *, max_model_len: int, block_size: int, num_prompt_logits: int, device: torch.device
) -> ModelInput:
    """Return a batch of ``max_num_batched_tokens`` prompt tokens, with as many logits as a step can ask for.

    Args:
        num_prompt_logits: the largest number of prompt tokens whose logits are computed at once.
    """
    num_tokens = config.max_num_batched_tokens
    length = min(num_tokens, max_model_len)
    starts = list(range(0, num_tokens, length))
    lengths = [min(length, num_tokens - start) for start in starts]
    width = -(-length // block_size)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.cat([torch.arange(count, device=device) for count in lengths])
    num_draft_tokens = config.speculation.num_speculative_tokens if config.speculation is not None else 0
    num_logits = min(min(config.max_num_seqs, num_tokens) * (1 + num_draft_tokens), num_tokens)
    return ModelInput(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        metadata=AttentionMetadata(
            slot_mapping=positions.clone(),  # all sequences write the same blocks: only sizes matter here
            cu_seqlens_q=tensor([*starts, num_tokens]),
            seq_lens=tensor(lengths),
            block_tables=torch.arange(width, dtype=torch.int32, device=device).repeat(len(lengths), 1),
            max_query_len=length,
            max_seq_len=length,
        ),
        logit_indices=torch.arange(num_logits, device=device),
        prompt_logit_indices=torch.arange(min(num_prompt_logits, num_tokens), device=device),
    )
