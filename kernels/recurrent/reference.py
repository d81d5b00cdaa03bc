"""ReferenceOps: what the operations of base.py compute, readably, by torch's operators on any device.

Recurrences go through time one token at a time, all sequences that are long enough at once. Each call waits for the
device, to learn how long the sequences are. The last bits are torch's: its SiLU rounds a number differently at the end
of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["ReferenceOps"]

_NORM_EPS = 1e-6  # added to the squares' sum of a query or key of the delta rule


class ReferenceOps(RecurrentOps):
    """The operations in the dtype of the states, in the order in which their formulas are written."""

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
        width, output = weight.shape[1], torch.zeros_like(inputs)
        taps = weight.to(state.dtype).unbind(1)
        for sequence in _sequences(metadata):
            earlier = torch.zeros_like(state[0]) if sequence.starts else state[sequence.slot]
            window = torch.cat((earlier, inputs[sequence.first : sequence.end].to(state.dtype)))
            sums = torch.zeros_like(window[width - 1 :]) if bias is None else bias.to(state.dtype)
            for index, tap in enumerate(taps):
                sums = sums + window[index : index + sequence.length] * tap
            output[sequence.first : sequence.end] = (F.silu(sums) if silu else sums).to(output.dtype)
            for token, slot in sequence.writes:
                after = token - sequence.first + 1
                state[slot] = window[after : after + width - 1]
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
        dtype, repeats = state.dtype, value.shape[1] // key.shape[1]
        queries = _normed(query.to(dtype)).repeat_interleave(repeats, dim=1) * query.shape[2] ** -0.5
        keys = _normed(key.to(dtype)).repeat_interleave(repeats, dim=1)
        values, betas = value.to(dtype), beta.to(dtype)
        factors = decay.to(dtype).exp().view(*decay.shape[:2], -1, 1)  # of a head's state, or of each of its rows
        output = torch.zeros_like(value)

        def step(past: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            past = past * factors[tokens]
            recalled = (keys[tokens, :, :, None] * past).sum(dim=2)
            change = (values[tokens] - recalled) * betas[tokens, :, None]
            past = past + keys[tokens, :, :, None] * change[:, :, None, :]
            output[tokens] = (queries[tokens, :, :, None] * past).sum(dim=2).to(output.dtype)
            return past

        _recur(state, metadata, step)
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
        dtype, repeats = state.dtype, inputs.shape[1] // keys.shape[1]
        factors = (steps.to(dtype) * decay.to(dtype)).exp()
        keys = keys.to(dtype).repeat_interleave(repeats, dim=1)
        queries = queries.to(dtype).repeat_interleave(repeats, dim=1)
        output = torch.zeros_like(inputs)

        def step(past: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            token_inputs = inputs[tokens].to(dtype)
            change = token_inputs * steps[tokens, :, None].to(dtype)
            past = past * factors[tokens, :, None, None] + change[:, :, :, None] * keys[tokens, :, None, :]
            read = (past * queries[tokens, :, None, :]).sum(dim=3)
            output[tokens] = (read + skip[:, None].to(dtype) * token_inputs).to(output.dtype)
            return past

        _recur(state, metadata, step)
        return output


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence's share of a step: its packed tokens, and after which of them its state is written where."""

    first: int
    end: int
    slot: int
    starts: bool
    writes: tuple[tuple[int, int], ...]  # token and slot

    @property
    def length(self) -> int:
        return self.end - self.first


def _sequences(metadata: RecurrentMetadata) -> Iterator[_Sequence]:
    """Return the sequences that compute a token, without padding."""
    bounds = metadata.cu_seqlens.tolist()
    saves = list(zip(metadata.save_tokens.tolist(), metadata.save_slots.tolist(), strict=True))
    rows = zip(pairwise(bounds), metadata.slots.tolist(), metadata.starts.tolist(), strict=True)
    for (first, end), slot, starts in rows:
        if slot >= 0 and end > first:
            own = [(token, to) for token, to in saves if first <= token < end and to >= 0]
            yield _Sequence(first, end, slot, bool(starts), (*own, (end - 1, slot)))


def _recur(
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Call ``step(past, tokens)`` for the sequences' first tokens, then for their second ones, and so on.

    Args:
        state: [num_slots, ...], read first and written where the metadata says.
        metadata: the step's batch.
        step: takes the states before the tokens, [n, ...], and returns those after them.
    """
    sequences = sorted(_sequences(metadata), key=lambda sequence: -sequence.length)
    if not sequences:
        return
    past = torch.stack([torch.zeros_like(state[0]) if seq.starts else state[seq.slot] for seq in sequences])
    for offset in range(sequences[0].length):
        sequences = [sequence for sequence in sequences if sequence.length > offset]
        tokens = torch.tensor([sequence.first + offset for sequence in sequences], device=state.device)
        past = step(past[: len(sequences)], tokens)
        for index, sequence in enumerate(sequences):
            for token, slot in sequence.writes:
                if token == sequence.first + offset:
                    state[slot] = past[index]


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS)
