"""The operations of recurrent layers in a captured step, by torch's operators, without a wait for a value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from kernels.recurrent.reference import ReferenceOps, _normed
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["TorchRecurrence"]


Step = tuple[torch.Tensor, torch.Tensor]  # outputs and states of one token of each sequence


class TorchRecurrence(ReferenceOps):
    """ReferenceOps, but for steps that are captured: launches depend on shapes alone.

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

        def step(past: torch.Tensor, inputs: torch.Tensor) -> Step:
            window = torch.cat((past, inputs[:, None].float()), dim=1)  # [num_seqs, width, channels]
            sums = (window * weight.t()).sum(dim=1)
            sums = sums if bias is None else sums + bias
            return F.silu(sums) if silu else sums, window[:, 1:]

        return _run(step, (inputs,), state, metadata).to(inputs.dtype)

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

        def step(past: torch.Tensor, *token: torch.Tensor) -> Step:
            query, key, value, decay, beta = token
            past = past * decay.exp()[:, :, None, None]
            change = (value.float() - (key[..., None] * past).sum(dim=2)) * beta[:, :, None]
            past = past + key[..., None] * change[:, :, None, :]
            return (query[..., None] * past).sum(dim=2), past

        return _run(step, (queries, keys, value, decay, beta), state, metadata).to(value.dtype)

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

        def step(past: torch.Tensor, *token: torch.Tensor) -> Step:
            inputs, steps, key, query = token
            past = past * (steps * decay).exp()[:, :, None, None]
            past = past + (inputs * steps[:, :, None])[..., None] * key
            return (past * query).sum(dim=3) + skip[:, None] * inputs, past

        return _run(step, (inputs.float(), steps, keys, queries), state, metadata).to(inputs.dtype)


def _run(
    step: Callable[..., Step], tokens: tuple[torch.Tensor, ...], state: torch.Tensor, metadata: RecurrentMetadata
) -> torch.Tensor:
    """Return the outputs of a step's tokens; write the states after it, and those that it saves."""
    states, num_tokens = _read(state, metadata), len(tokens[0])
    if num_tokens == metadata.num_decodes == metadata.num_seqs:
        outputs, states = step(states, *tokens)
        _write(state, metadata.slots, states)
        return outputs
    every = torch.arange(num_tokens)
    owners = torch.searchsorted(metadata.cu_seqlens[1:].long(), every, right=True).clamp(max=metadata.num_seqs - 1)
    output, after = [], []
    for index in range(num_tokens):
        owner = owners[index : index + 1]
        result, new = step(states[owner], *(part[index : index + 1] for part in tokens))
        states = states.index_put((owner,), new)
        output.append(result)
        after.append(new)
    _write(state, metadata.slots, states)
    if len(metadata.save_tokens):
        _write(state, metadata.save_slots, torch.cat(after)[metadata.save_tokens.clamp(max=num_tokens - 1).long()])
    return torch.cat(output)


def _read(state: torch.Tensor, metadata: RecurrentMetadata) -> torch.Tensor:
    """Return the states before the tokens, [num_seqs, ...]; of padding any."""
    earlier = state[metadata.slots.clamp(min=0).long()]
    return torch.where(_as(earlier, metadata.starts == 1), 0.0, earlier)


def _write(state: torch.Tensor, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Write every slot, most of them with what it holds."""
    writers = slots[:, None] == torch.arange(state.shape[0])  # [len(slots), num_slots]
    written = states[writers.int().argmax(dim=0)]
    state.copy_(torch.where(_as(written, writers.any(dim=0)), written, state))


def _as(like: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return flags.view(-1, *[1] * (like.dim() - 1))
