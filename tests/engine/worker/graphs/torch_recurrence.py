"""The operations of recurrent layers in a captured step, by torch's operators, without a wait for a value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from kernels.recurrent.reference import ReferenceOps, _normed
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["TorchRecurrence"]


class TorchRecurrence(ReferenceOps):
    """ReferenceOps, but for steps that are captured: launches of a step of decodes depend on shapes alone.

    Args:
        is_capturing: whether a step is captured now.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing

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
        if not self._is_capturing():
            return super().causal_conv(inputs, weight, bias, state, metadata, silu=silu)
        window = torch.cat((_read(state, metadata), inputs[:, None].float()), dim=1)  # [num_seqs, width, channels]
        sums = (window * weight.t()).sum(dim=1)
        sums = sums if bias is None else sums + bias
        _write(state, metadata, window[:, 1:])
        return (F.silu(sums) if silu else sums).to(inputs.dtype)

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
        if not self._is_capturing():
            return super().gated_delta_rule(query, key, value, decay, beta, state, metadata)
        repeats = value.shape[1] // key.shape[1]
        queries = _normed(query.float()).repeat_interleave(repeats, dim=1) * query.shape[2] ** -0.5
        keys = _normed(key.float()).repeat_interleave(repeats, dim=1)
        past = _read(state, metadata) * decay.exp()[:, :, None, None]
        change = (value.float() - (keys[..., None] * past).sum(dim=2)) * beta[:, :, None]
        past = past + keys[..., None] * change[:, :, None, :]
        _write(state, metadata, past)
        return (queries[..., None] * past).sum(dim=2).to(value.dtype)

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
        if not self._is_capturing():
            return super().selective_scan(inputs, steps, decay, keys, queries, skip, state, metadata)
        repeats = inputs.shape[1] // keys.shape[1]
        keys, queries = (part.float().repeat_interleave(repeats, dim=1)[:, :, None] for part in (keys, queries))
        past = _read(state, metadata) * (steps * decay).exp()[:, :, None, None]
        past = past + (inputs.float() * steps[:, :, None])[..., None] * keys
        _write(state, metadata, past)
        return ((past * queries).sum(dim=3) + skip[:, None] * inputs.float()).to(inputs.dtype)


def _read(state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
    """Return the states before the tokens, [num_seqs, ...]; of padding any."""
    earlier = state[metadata.slots.clamp(min=0).long()]
    return torch.where(_as(earlier, metadata.starts == 1), 0.0, earlier)


def _write(state: torch.Tensor, metadata: RecurrentMetadata, states: torch.Tensor) -> None:
    """Write every slot, most of them with what it holds."""
    writers = metadata.slots[:, None] == torch.arange(state.shape[0])  # [num_seqs, num_slots]
    written = states[writers.int().argmax(dim=0)]
    state.copy_(torch.where(_as(written, writers.any(dim=0)), written, state))


def _as(like: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return flags.view(-1, *[1] * (like.dim() - 1))
