"""Pending token ids as a Triton kernel: torch would launch seven. The contract is `kernels.cache.pending_tokens`'s."""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["take_pending_tokens_triton"]

_BLOCK = 256


# A step's arrays may be slices of one buffer, and a step must not wait for a compilation.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["token_ids", "sampled", "state_slots"])
def _take_pending_kernel(token_ids, sampled, state_slots, num_tokens, HAS_STATES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_ids + token, mask=token < num_tokens, other=0)
    is_pending = token_id < 0
    sampled_id = tl.load(sampled + ~token_id, mask=is_pending, other=0)
    tl.store(token_ids + token, tl.maximum(sampled_id, 0), mask=is_pending)
    if HAS_STATES:
        tl.store(state_slots + token, -1, mask=is_pending & (sampled_id < 0))


def take_pending_tokens_triton(
    token_ids: torch.Tensor, sampled: torch.Tensor, state_slots: torch.Tensor | None = None
) -> None:
    """Launch `kernels.cache.pending_tokens.take_pending_tokens`, whose arguments it shares."""
    assert token_ids.is_contiguous()
    assert sampled.is_contiguous()
    assert state_slots is None or state_slots.is_contiguous()
    if num_tokens := len(token_ids):
        _take_pending_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            token_ids,
            sampled,
            token_ids if state_slots is None else state_slots,
            num_tokens,
            HAS_STATES=state_slots is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
