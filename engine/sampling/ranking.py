"""The likeliest tokens of a row, and the log-probabilities of chosen ones. It knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.outputs import Logprob, TokenLogprobs
from kernels.cpu import sampling as cpu_sampling

__all__ = ["gather_logprobs", "likeliest"]


def likeliest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest of float32 ``scores`` [rows, vocab_size] in order, and their token ids, both [rows, k].

    Of equal scores the smaller id goes first, so that the first k of a longer answer are the answer for k. Logits of
    16 bits are often equal, and torch.topk would take any of those.
    """
    if cpu_sampling.can_sample(scores):
        return cpu_sampling.top_k(scores, k)
    vocab_size = scores.shape[1]
    bits = scores.view(torch.int32)
    ascending = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)  # integers in the order of the floats
    keys = ascending.long().bitwise_left_shift_(32)
    keys |= torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    token_ids = vocab_size - 1 - (keys.topk(min(k, vocab_size), dim=1).values & 0xFFFFFFFF)
    return scores.gather(1, token_ids), token_ids


def gather_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row of ``logprobs`` [rows, vocab_size] its token (int64 [rows]) and its ``counts`` likeliest."""
    ids = token_ids[:, None]
    values = logprobs.gather(1, ids)
    ranks = (logprobs > values).sum(dim=1, keepdim=True) + 1
    if any(counts):
        top_values, top_ids = likeliest(logprobs, max(counts))
        top_ranks = (top_values[:, None, :] > top_values[:, :, None]).sum(dim=2) + 1
        ids, values = torch.cat((ids, top_ids), dim=1), torch.cat((values, top_values), dim=1)
        ranks = torch.cat((ranks, top_ranks), dim=1)
    return [
        {
            token_id: Logprob(logprob, rank)
            for token_id, logprob, rank in zip(row_ids[: 1 + k], row_values, row_ranks, strict=False)
        }
        for row_ids, row_values, row_ranks, k in zip(ids.tolist(), values.tolist(), ranks.tolist(), counts, strict=True)
    ]
