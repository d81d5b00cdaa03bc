"""take_pending_tokens: replaces placeholders by the tokens that the previous step sampled.

With overlapping steps, a step is planned before the previous step's tokens are on the host. The device may have no
token for a sequence: the host still has to choose it, or there is none. Then the step computes something that is
dropped, and must leave the sequence's states as they are.
"""

from __future__ import annotations

import torch

__all__ = ["take_pending_tokens"]


def take_pending_tokens(
    token_ids: torch.Tensor, sampled: torch.Tensor, state_slots: torch.Tensor | None = None
) -> None:
    """Replace each negative token id ``~index`` by ``sampled[index]``, or by 0 if that is negative, in place.

    The 0 only keeps the model from reading out of bounds. What it leads to is dropped, but a state that has seen it
    could not be taken back: its slot becomes -1, so that it is neither read nor written.

    Args:
        token_ids: int64 [n], contiguous.
        sampled: int64 [num_sampled], contiguous.
        state_slots: int32 [n], contiguous: the slots of the tokens' states; None if the model has none.
    """
    if token_ids.device.type == "cpu":
        is_pending = token_ids < 0
        taken = sampled[~token_ids[is_pending]]
        token_ids[is_pending] = taken.clamp(min=0)
        if state_slots is not None:
            state_slots[is_pending] = state_slots[is_pending].masked_fill(taken < 0, -1)
    else:
        from kernels.cache.triton.pending_tokens import take_pending_tokens_triton

        take_pending_tokens_triton(token_ids, sampled, state_slots)
