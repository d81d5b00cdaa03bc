"""The most likely tokens, and the log-probabilities of given tokens. This module does not know requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.outputs import Logprob, TokenLogprobs
from kernels.cpu import sampling as cpu_sampling
from kernels.device_copy import start_to_host

__all__ = ["PendingLogprobs", "gather_listed", "gather_logprobs", "top_tokens"]


def top_tokens(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest of float32 ``scores`` [n, vocab_size], highest first, and their token ids, both [n, k].

    Of equal scores the smaller token id comes first, so that the result for k is a prefix of the result for k + 1.
    16-bit logits are often equal, and torch.topk returns equal ones in any order.
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


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host: tensors there, all [n, 1 + k], to be read after the device is done.

    For each index the given token comes first, then the most likely ones.
    """

    token_ids: torch.Tensor  # int64
    logprobs: torch.Tensor  # float32
    ranks: torch.Tensor  # int64
    num_top_tokens: Sequence[int]  # [n]: how many of the k are wanted

    def to_lists(self) -> list[TokenLogprobs]:
        """Return what each index wants. The copies must be complete: see ``wait_for_device``."""
        return [
            {
                token_id: Logprob(logprob, rank)
                for token_id, logprob, rank in zip(own_ids[: 1 + k], own_values, own_ranks, strict=False)
            }
            for own_ids, own_values, own_ranks, k in zip(
                self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), self.num_top_tokens, strict=True
            )
        ]


def gather_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: Sequence[int]) -> PendingLogprobs:
    """Find the log-probabilities and ranks of given tokens and of the most likely tokens.

    Args:
        logprobs: [n, vocab_size].
        token_ids: int64 [n]: one token for each index; it comes first in the result.
        num_top_tokens: for each index, how many of the most likely tokens follow; -1 for all.
    """
    counts = [logprobs.shape[1] if count == -1 else count for count in num_top_tokens]
    ids = token_ids[:, None]
    values = logprobs.gather(1, ids)
    ranks = (logprobs > values).sum(dim=1, keepdim=True) + 1
    if any(counts):
        top_values, top_ids = top_tokens(logprobs, max(counts))
        negated = -top_values  # ascending; all that are more likely than one of these tokens are before it
        top_ranks = torch.searchsorted(negated, negated) + 1
        ids, values = torch.cat((ids, top_ids), dim=1), torch.cat((values, top_values), dim=1)
        ranks = torch.cat((ranks, top_ranks), dim=1)
    return PendingLogprobs(start_to_host(ids), start_to_host(values), start_to_host(ranks), counts)


def gather_listed(logprobs: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> PendingLogprobs:
    """Find the log-probabilities and ranks of several given tokens at each index.

    Args:
        logprobs: [n, vocab_size].
        token_ids: int64 [n, k], padded with any id.
        counts: for each index, how many of the k are wanted, at least one.
    """
    values = logprobs.gather(1, token_ids)
    ranks = [(logprobs > column[:, None]).sum(dim=1) + 1 for column in values.unbind(dim=1)]  # [n] each: less memory
    num_others = [count - 1 for count in counts]
    on_host = start_to_host(token_ids), start_to_host(values), start_to_host(torch.stack(ranks, dim=1))
    return PendingLogprobs(*on_host, num_others)
