"""TritonOps: each operation of a recurrent layer as a launch of the kernels of this folder.

Every launch parameter follows from shapes, never from what a tensor holds, so a CUDA graph can capture a step. Those
that compile follow from the model alone. The tokens of padding sequences get no output.
"""

from __future__ import annotations

import torch
import triton

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.triton.conv import conv_other_tokens_kernel, conv_sequence_kernel
from kernels.recurrent.triton.delta_rule import delta_rule_kernel
from kernels.recurrent.triton.scan import scan_kernel
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["TritonOps"]

_CHANNEL_BLOCK = 256
_STATE_ELEMENTS = 1024  # of a program with one warp, whose threads sum without a barrier
_NORM_EPS = 1e-6  # added to the squares' sum of a query or key of the delta rule


class TritonOps(RecurrentOps):
    """The operations on a GPU, or in Triton's interpreter; a token's bits do not depend on the step."""

    def causal_conv(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
        *,
        silu: bool,
    ) -> torch.Tensor:
        num_tokens, channels = inputs.shape
        assert inputs.stride(1) == 1
        assert weight.is_contiguous()
        output = inputs.new_empty(inputs.shape)
        num_blocks = triton.cdiv(channels, _CHANNEL_BLOCK)
        constants = {"CHANNELS": channels, "WIDTH": weight.shape[1], "BLOCK": _CHANNEL_BLOCK, "HAS_SILU": silu}
        if num_tokens > metadata.num_decodes:  # or no sequence has several tokens
            conv_other_tokens_kernel[num_tokens, num_blocks](
                output,
                inputs,
                weight,
                bias,
                metadata.cu_seqlens,
                metadata.slots,
                metadata.num_seqs,
                inputs.stride(0),
                **constants,
                enable_fp_fusion=False,  # both kernels round alike
            )
        conv_sequence_kernel[num_blocks, metadata.num_seqs](
            output,
            inputs,
            weight,
            bias,
            _contiguous(state),
            *_batch(metadata),
            inputs.stride(0),
            **constants,
            enable_fp_fusion=False,
        )
        return output

    def gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        (_, num_key_heads, key_dim), (_, num_heads, value_dim) = key.shape, value.shape
        output = value.new_empty(value.shape)
        block_key = triton.next_power_of_2(key_dim)
        block_value = _block(value_dim, block_key)
        delta_rule_kernel[triton.cdiv(value_dim, block_value), num_heads, metadata.num_seqs](
            output,
            query,
            key,
            value,
            decay.contiguous(),
            beta.contiguous(),
            _contiguous(state),
            *_batch(metadata),
            *map(_token_stride, (query, key, value)),
            _NORM_EPS,
            key_dim**-0.5,
            NUM_HEADS=num_heads,
            HEADS_PER_KEY=num_heads // num_key_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_KEY=block_key,
            BLOCK_VALUE=block_value,
            DECAYS_ROWS=decay.dim() == 3,
            num_warps=1,
            enable_fp_fusion=True,
        )
        return output

    def selective_scan(
        self,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        decay: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        (_, num_heads, head_dim), (_, num_groups, state_size) = inputs.shape, keys.shape
        output = inputs.new_empty(inputs.shape)
        block_state = triton.next_power_of_2(state_size)
        block_dim = _block(head_dim, block_state)
        scan_kernel[triton.cdiv(head_dim, block_dim), num_heads, metadata.num_seqs](
            output,
            inputs,
            steps.contiguous(),
            decay,
            keys,
            queries,
            skip,
            _contiguous(state),
            *_batch(metadata),
            *map(_token_stride, (inputs, keys, queries)),
            NUM_HEADS=num_heads,
            HEADS_PER_GROUP=num_heads // num_groups,
            HEAD_DIM=head_dim,
            STATE_SIZE=state_size,
            BLOCK_DIM=block_dim,
            BLOCK_STATE=block_state,
            num_warps=1,
            enable_fp_fusion=True,
        )
        return output


def _batch(metadata: RecurrentMetadata) -> tuple[torch.Tensor | int, ...]:
    """Return what the kernels take of a step, in their order."""
    saves = metadata.save_tokens, metadata.save_slots
    return metadata.cu_seqlens, metadata.slots, metadata.starts, *saves, metadata.save_tokens.shape[0]


def _block(size: int, other_size: int) -> int:
    """Return how many rows or columns of ``size``, a power of two, a program computes; each has ``other_size``."""
    block: int = min(triton.next_power_of_2(size), max(_STATE_ELEMENTS // other_size, 1))
    return block


def _contiguous(state: torch.Tensor) -> torch.Tensor:
    assert state.is_contiguous()
    return state


def _token_stride(heads: torch.Tensor) -> int:
    """Return the elements from one token to the next of ``heads`` [num_tokens, num_heads, dim]."""
    assert heads.stride(2) == 1
    assert heads.shape[1] == 1 or heads.stride(1) == heads.shape[2]
    return heads.stride(0)
