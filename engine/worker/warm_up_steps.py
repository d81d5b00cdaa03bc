"""The warm-up's steps: the largest one, whose peak of GPU memory is measured, and those that compile kernels.

Their sequences all read and write block 0, because only shapes matter: they need a KV cache of one page in each pool.
Only the first one has a slot for its states.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.config import EngineConfig
from engine.worker.step_plan import ModelInput
from kernels.attention_metadata import AttentionMetadata, leading_decodes
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["largest_step", "one_sequence"]


def largest_step(
    config: EngineConfig,
    *,
    max_model_len: int,
    block_size: int,
    num_prompt_logits: int,
    device: torch.device,
    expands_latents: bool = False,
) -> ModelInput:
    """Return a batch of ``max_num_batched_tokens`` prompt tokens, with as many logits as a step can ask for.

    Its memory is laid out for contexts of ``max_model_len``, as that of chunks of the longest prompt: an indexer has a
    score for each of their tokens.

    Args:
        num_prompt_logits: the largest number of prompt tokens whose logits are computed at once.
        expands_latents: whether latents are expanded, which takes a workspace; else they are absorbed, which takes more
            memory for what attention returns.
    """
    num_tokens = config.tokens_per_step
    length = min(num_tokens, max_model_len)
    lengths = [min(length, num_tokens - start) for start in range(0, num_tokens, length)]
    num_draft_tokens = config.speculation.num_speculative_tokens if config.speculation is not None else 0
    num_logits = min(min(config.max_num_seqs, num_tokens) * (1 + num_draft_tokens), num_tokens)
    return _model_input(
        [(count, count) for count in lengths],
        block_size,
        device,
        max_seq_len=max_model_len,
        num_logits=num_logits,
        num_prompt_logits=min(num_prompt_logits, num_tokens),
        knows_lengths=expands_latents,
    )


def one_sequence(query_len: int, seq_len: int, *, block_size: int, device: torch.device) -> ModelInput:
    """Return a batch of the last ``query_len`` tokens of a context of ``seq_len``, without logits."""
    return _model_input([(query_len, seq_len)], block_size, device)


def _model_input(
    lengths: list[tuple[int, int]],
    block_size: int,
    device: torch.device,
    *,
    max_seq_len: int | None = None,
    num_logits: int = 0,
    num_prompt_logits: int = 0,
    knows_lengths: bool = False,
) -> ModelInput:
    """Return a batch of sequences given as (query_len, seq_len); None as ``max_seq_len``: that of the longest one."""
    query_lens, seq_lens = [query_len for query_len, _ in lengths], [seq_len for _, seq_len in lengths]
    max_seq_len = max_seq_len or max(seq_lens)
    positions = torch.cat([torch.arange(end - count, end, device=device) for count, end in lengths])

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ModelInput(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        metadata=AttentionMetadata(
            slot_mapping=positions % block_size,
            cu_seqlens_q=tensor([0, *accumulate(query_lens)]),
            seq_lens=tensor(seq_lens),
            block_tables=tensor([0] * -(-max_seq_len // block_size)).repeat(len(lengths), 1),
            num_decodes=leading_decodes(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max_seq_len,
            host_lens=tuple(lengths[leading_decodes(query_lens) :]) if knows_lengths else (),
        ),
        logit_indices=torch.arange(num_logits, device=device),
        prompt_logit_indices=torch.arange(num_prompt_logits, device=device),
        recurrent=RecurrentMetadata(
            cu_seqlens=tensor([0, *accumulate(query_lens)]),
            slots=tensor([0] + [-1] * (len(lengths) - 1)),
            starts=tensor([1] * len(lengths)),
            save_tokens=tensor([]),
            save_slots=tensor([]),
            num_decodes=leading_decodes(query_lens),
        ),
    )
