"""take_pending_tokens: fills in the token ids of a step that only the device knows, as the last step has sampled them.

Steps that overlap are planned before the last one's tokens are on the host.
"""

from __future__ import annotations

import torch

__all__ = ["take_pending_tokens"]


def take_pending_tokens(token_ids: torch.Tensor, sampled: torch.Tensor) -> None:
    """Replace each negative token id ``~index`` by ``sampled[index]``, or by 0 if that is negative, in place.

    A sequence that has sampled no token ends before its next one is read, but must not make the model read out of
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
