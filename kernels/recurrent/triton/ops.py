"""TritonOps: each operation of a recurrent layer as launches of the kernels of this folder.

Every launch parameter follows from shapes, never from what a tensor holds, so a CUDA graph can capture a step. Those
that compile follow from the model alone. The tokens of padding sequences get no output.

Recurrences of a sequence's few tokens, as in decodes, are computed token by token; those of more tokens, as in prompts,
in chunks, whose products run on tensor cores. Both kinds of kernels are launched for a step with prompts, and each
finds its sequences.
"""

from __future__ import annotations

import torch
import triton

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.triton.conv import conv_other_tokens_kernel, conv_sequence_kernel
from kernels.recurrent.triton.delta_rule import delta_rule_kernel
from kernels.recurrent.triton.prompts import (
    MAX_SHORT,
    NORM_EPS,
    delta_rule_of_prompts,
    row_decays_of_prompts,
    scan_of_prompts,
    token_stride,
)
from kernels.recurrent.triton.scan import scan_kernel
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["TritonOps"]

_CHANNEL_BLOCK = 256
_TOKEN_BLOCK = 16  # of a convolution; its weights are loaded once for them
_STATE_ELEMENTS = 1024  # of a program with one warp, whose threads sum without a barrier
_ANY_LENGTH = 2**31 - 1


class TritonOps(RecurrentOps):
    """The operations on a GPU, or in Triton's interpreter.

    Args:
        batch_invariant: compute all recurrences token by token, which is slow for prompts: a token's bits then do not
            depend on the step. Otherwise those of a prompt's token in 16 bits depend on where the step's chunk of the
            prompt begins and where its states are saved, but never on other sequences; and states are rounded to the
            tokens' dtype where they are multiplied.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def _max_length(self, metadata: RecurrentMetadata, tokens: torch.Tensor) -> int:
        """Return the length of the longest sequence of a step that is computed token by token."""
        has_prompts = len(tokens) - metadata.num_decodes > MAX_SHORT
        in_chunks = has_prompts and not self.batch_invariant and tokens.dtype != torch.float32
        return MAX_SHORT if in_chunks else _ANY_LENGTH

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
            num_token_blocks = triton.cdiv(num_tokens - metadata.num_decodes, _TOKEN_BLOCK)
            conv_other_tokens_kernel[num_token_blocks, num_blocks](
                output,
                inputs,
                weight,
                bias,
                metadata.cu_seqlens,
                metadata.slots,
                num_tokens,
                metadata.num_seqs,
                metadata.num_decodes,
                inputs.stride(0),
                TOKENS=_TOKEN_BLOCK,
                TAPS=triton.next_power_of_2(weight.shape[1]),
                num_warps=8,
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
        decay, beta = decay.contiguous(), beta.contiguous()
        max_length = self._max_length(metadata, value)
        block_key = triton.next_power_of_2(key_dim)
        block_value = _block(value_dim, block_key)
        delta_rule_kernel[triton.cdiv(value_dim, block_value), num_heads, metadata.num_seqs](
            output,
            query,
            key,
            value,
            decay,
            beta,
            _contiguous(state),
            *_batch(metadata),
            max_length,
            *map(token_stride, (query, key, value)),
            NORM_EPS,
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
        if max_length == MAX_SHORT:
            of_prompts = delta_rule_of_prompts if decay.dim() == 2 else row_decays_of_prompts
            of_prompts(output, query, key, value, decay, beta, state, metadata)
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
        steps, max_length = steps.contiguous(), self._max_length(metadata, inputs)
        block_state = triton.next_power_of_2(state_size)
        block_dim = _block(head_dim, block_state)
        scan_kernel[triton.cdiv(head_dim, block_dim), num_heads, metadata.num_seqs](
            output,
            inputs,
            steps,
            decay,
            keys,
            queries,
            skip,
            _contiguous(state),
            *_batch(metadata),
            max_length,
            *map(token_stride, (inputs, keys, queries)),
            NUM_HEADS=num_heads,
            HEADS_PER_GROUP=num_heads // num_groups,
            HEAD_DIM=head_dim,
            STATE_SIZE=state_size,
            BLOCK_DIM=block_dim,
            BLOCK_STATE=block_state,
            num_warps=1,
            enable_fp_fusion=True,
        )
        if max_length == MAX_SHORT:
            scan_of_prompts(output, inputs, steps, decay, keys, queries, skip, state, metadata)
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
