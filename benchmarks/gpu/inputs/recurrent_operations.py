"""The operations of recurrent layers with random tensors, and batches of them, for the parts of the check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import functional as F

from benchmarks.gpu.sizes import RecurrentShape
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["Chunk", "Operation", "Tokens", "batch_of", "operations", "random_states"]

Tokens = tuple[torch.Tensor, ...]  # what an operation takes of each token, in its order: [num_tokens, ...]


class Operation(Protocol):
    """An operation with its sizes and weights, on a device."""

    @property
    def name(self) -> str: ...

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    def tokens(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tokens:
        """Return the inputs of ``count`` random tokens; in the model's layout, as parts of wider tensors."""

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor: ...


def _random(seed: int, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


class _Conv:
    name = "convolution"

    def __init__(self, shape: RecurrentShape, device: torch.device) -> None:
        self._channels, self._width = shape.conv
        self._device = device
        self.state_shape = (self._width - 1, self._channels)
        self._weight = _random(1, device, self._channels, self._width)
        self._bias = _random(2, device, self._channels)

    def tokens(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tokens:
        projected = _random(10 + seed, self._device, count, self._channels + 64).to(dtype)
        return (projected[:, 64:],)

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        (inputs,) = tokens
        weight, bias = self._weight.to(inputs.dtype), self._bias.to(inputs.dtype)
        return ops.causal_conv(inputs, weight, bias, state, metadata, silu=True)


class _DeltaRule:
    name = "delta rule"
    has_row_decays = False

    def __init__(self, shape: RecurrentShape, device: torch.device) -> None:
        self._key_heads, self._heads, self._key_dim, self._value_dim = shape.delta_rule
        self._device = device
        self.state_shape = (self._heads, self._key_dim, self._value_dim)

    def tokens(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tokens:
        keys, values = self._key_heads * self._key_dim, self._heads * self._value_dim
        mixed = _random(10 + seed, self._device, count, 2 * keys + values).to(dtype)
        query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
        decay, beta = _random(11 + seed, self._device, 2, count, self._heads)
        if self.has_row_decays:
            decay = _random(12 + seed, self._device, count, self._heads, self._key_dim)
        return (
            query.view(count, self._key_heads, -1),
            key.view(count, self._key_heads, -1),
            value.view(count, self._heads, -1),
            -F.softplus(decay),
            beta.sigmoid(),
        )

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        query, key, value, decay, beta = tokens
        return ops.gated_delta_rule(query, key, value, decay, beta, state, metadata)


class _RowDecays(_DeltaRule):
    """With a decay of each row of a state, as Kimi Linear's."""

    name = "row decays"
    has_row_decays = True


class _Scan:
    name = "selective scan"

    def __init__(self, shape: RecurrentShape, device: torch.device) -> None:
        self._groups, self._heads, self._head_dim, self._state_size = shape.scan
        self._device = device
        self.state_shape = (self._heads, self._head_dim, self._state_size)
        self._decay, self._skip = -_random(1, device, self._heads).exp(), _random(2, device, self._heads)

    def tokens(self, count: int, dtype: torch.dtype, seed: int = 0) -> Tokens:
        sizes = [self._heads * self._head_dim, *[self._groups * self._state_size] * 2]
        mixed = _random(10 + seed, self._device, count, sum(sizes)).to(dtype)
        inputs, keys, queries = torch.split(mixed, sizes, dim=1)
        steps = F.softplus(_random(11 + seed, self._device, count, self._heads))
        groups = (part.view(count, self._groups, -1) for part in (keys, queries))
        return inputs.view(count, self._heads, -1), steps, *groups

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        inputs, steps, keys, queries = tokens
        return ops.selective_scan(inputs, steps, self._decay, keys, queries, self._skip, state, metadata)


def operations(shape: RecurrentShape, device: torch.device) -> list[Operation]:
    """Return the three operations; the delta rule with a decay of each head, and of each row of a state."""
    return [kind(shape, device) for kind in (_Conv, _DeltaRule, _RowDecays, _Scan)]


def random_states(operation: Operation, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` slots that hold something, as those of earlier sequences do."""
    return _random(99, device, count, *operation.state_shape)


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a step.

    Attributes:
        length: their number.
        slot: of the sequence's state; -1: padding.
        starts: whether they are the sequence's first.
        save: (index of a token in the chunk, slot): where the state after it is kept.
    """

    length: int
    slot: int
    starts: bool = False
    save: tuple[int, int] | None = None


def batch_of(chunks: Sequence[Chunk], device: torch.device) -> RecurrentMetadata:
    """Return a step's batch."""

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = list(accumulate(chunk.length for chunk in chunks))
    saves = [
        (end - chunk.length + chunk.save[0], chunk.save[1])
        for end, chunk in zip(ends, chunks, strict=True)
        if chunk.save is not None
    ]
    return RecurrentMetadata(
        cu_seqlens=integers([0, *ends]),
        slots=integers([chunk.slot for chunk in chunks]),
        starts=integers([int(chunk.starts) for chunk in chunks]),
        save_tokens=integers([token for token, _ in saves]),
        save_slots=integers([slot for _, slot in saves]),
        num_decodes=next((i for i, chunk in enumerate(chunks) if chunk.length > 1), len(chunks)),
    )
