"""COps: the operations of recurrent layers as C kernels compute them (kernels/cpu/csrc/recurrent).

A token's bits are the same alone, in any batch, in a chunk of any size, from a saved state on and on any number of
threads. Models whose whole layers run in C call the same kernels there.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.bindings import CConvCall, CDeltaRuleCall, CScanCall, address
from kernels.cpu.library import require
from kernels.cpu.sequences import CpuSequences
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["COps"]

_MOST_TAPS = 16  # MAX_WIDTH in causal_conv.c


class COps(RecurrentOps):
    """The operations on a CPU, for states in float32; the kernels must be available (library.py)."""

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
        sequences, output = CpuSequences(metadata), _float_copy(inputs)
        taps, biases = weight.t().float().contiguous(), None if bias is None else bias.float().contiguous()
        num_tokens, channels = output.shape
        assert weight.shape[1] <= _MOST_TAPS
        call = CConvCall(
            ctypes.pointer(sequences.c_sequences),
            output.data_ptr(),
            taps.data_ptr(),
            address(biases),
            _state_address(state),
            channels,
            num_tokens,
            channels,
            weight.shape[1],
            silu,
        )
        require().pagoda_causal_conv(call)
        return output.to(inputs.dtype)

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
        sequences = CpuSequences(metadata)
        mixed = torch.cat([part.float().flatten(1) for part in (query, key, value)], dim=1)
        decays, betas, output = _float_copy(decay), beta.float().contiguous(), torch.zeros(value.shape)
        (num_tokens, num_key_heads, key_dim), (_, num_heads, value_dim) = key.shape, value.shape
        call = CDeltaRuleCall(
            ctypes.pointer(sequences.c_sequences),
            output.data_ptr(),
            mixed.data_ptr(),
            decays.data_ptr(),
            betas.data_ptr(),
            _state_address(state),
            mixed.shape[1],
            decays[0].numel(),
            num_heads,
            num_tokens,
            num_key_heads,
            num_heads,
            key_dim,
            value_dim,
            decay.dim() == 3,
        )
        require().pagoda_gated_delta_rule(call)
        return output.to(value.dtype)

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
        sequences = CpuSequences(metadata)
        mixed = torch.cat([part.float().flatten(1) for part in (inputs, keys, queries)], dim=1)
        numbers = [part.float().contiguous() for part in (steps, decay, skip)]
        output = torch.zeros(inputs.shape)
        (_, num_heads, head_dim), (_, num_groups, state_size) = inputs.shape, keys.shape
        call = CScanCall(
            ctypes.pointer(sequences.c_sequences),
            output.data_ptr(),
            mixed.data_ptr(),
            *(part.data_ptr() for part in numbers),
            _state_address(state),
            mixed.shape[1],
            num_heads,
            num_heads,
            num_groups,
            head_dim,
            state_size,
        )
        require().pagoda_selective_scan(call)
        return output.to(inputs.dtype)


def _float_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32, which a kernel may overwrite."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _state_address(state: torch.Tensor) -> int:
    assert state.dtype == torch.float32
    assert state.is_contiguous()
    return state.data_ptr()
