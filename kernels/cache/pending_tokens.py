"""take_pending_tokens: replaces placeholders by the tokens that the previous step sampled.

With overlapping steps, a step is planned before the previous step's tokens are on the host.
"""

from __future__ import annotations

import torch

__all__ = ["take_pending_tokens"]


def take_pending_tokens(token_ids: torch.Tensor, sampled: torch.Tensor) -> None:
    """Replace each negative token id ``~index`` by ``sampled[index]``, or by 0 if that is negative, in place.

    A sequence without a sampled token ends before its next token is read, but it must not make the model read out of
    bounds.

    Args:
        token_ids: int64 [n], contiguous.
        sampled: int64 [num_sampled], contiguous.
    """
    if token_ids.device.type == "cpu":
        is_pending = token_ids < 0
        token_ids[is_pending] = sampled[~token_ids[is_pending]].clamp(min=0)
    else:
        from kernels.cache.triton.pending_tokens import take_pending_tokens_triton

        take_pending_tokens_triton(token_ids, sampled)
