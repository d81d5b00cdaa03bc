"""The three operations with random tensors, and steps of several sequences through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["Chunk", "Conv", "DeltaRule", "Operation", "Scan", "Tokens", "new_states", "run_step"]

Tokens = tuple[torch.Tensor, ...]  # what an operation takes of each token, in its order: [num_tokens, ...]


class Operation(Protocol):
    """One of the three operations, with its sizes and weights."""

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    def tokens(self, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
        """Return random inputs of ``count`` tokens."""

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor: ...


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Conv:
    channels: int = 37
    width: int = 4
    silu: bool = True
    has_bias: bool = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.width - 1, self.channels

    @property
    def weight(self) -> torch.Tensor:
        return _normal(1, self.channels, self.width)

    @property
    def bias(self) -> torch.Tensor | None:
        return _normal(2, self.channels) if self.has_bias else None

    def tokens(self, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
        return (_normal(seed, count, self.channels).to(dtype),)

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        return ops.causal_conv(*tokens, self.weight, self.bias, state, metadata, silu=self.silu)


@dataclass(frozen=True)
class DeltaRule:
    num_key_heads: int = 2
    num_heads: int = 4
    key_dim: int = 16
    value_dim: int = 24
    decays_rows: bool = False  # whether each element of a key has a decay of its own

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    def tokens(self, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
        keys = [_normal(seed + i, count, self.num_key_heads, self.key_dim).to(dtype) for i in range(2)]
        values = _normal(seed + 2, count, self.num_heads, self.value_dim).to(dtype)
        rows = (self.key_dim,) if self.decays_rows else ()
        decay = -_normal(seed + 3, count, self.num_heads, *rows).abs()
        return *keys, values, decay, _normal(seed + 4, count, self.num_heads).sigmoid()

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        return ops.gated_delta_rule(*tokens, state, metadata)


@dataclass(frozen=True)
class Scan:
    num_groups: int = 2
    num_heads: int = 4
    head_dim: int = 12
    state_size: int = 16

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size

    @property
    def decay(self) -> torch.Tensor:
        return -_normal(1, self.num_heads).exp()

    @property
    def skip(self) -> torch.Tensor:
        return _normal(2, self.num_heads)

    def tokens(self, count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
        inputs = _normal(seed, count, self.num_heads, self.head_dim).to(dtype)
        steps = torch.nn.functional.softplus(_normal(seed + 1, count, self.num_heads))
        groups = [_normal(seed + 2 + i, count, self.num_groups, self.state_size).to(dtype) for i in range(2)]
        return inputs, steps, *groups

    def __call__(
        self, ops: RecurrentOps, tokens: Tokens, state: torch.Tensor, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        inputs, steps, keys, queries = tokens
        return ops.selective_scan(inputs, steps, self.decay, keys, queries, self.skip, state, metadata)


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a step.

    Attributes:
        saves: the slot that the state is saved to after a token, by the token's index in the chunk.
    """

    tokens: Tokens
    slot: int
    starts: bool = False
    saves: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.tokens[0])


def new_states(operation: Operation, count: int) -> torch.Tensor:
    """Return ``count`` slots that hold something else, as those of earlier sequences do."""
    return _normal(99, count, *operation.state_shape)


def run_step(
    ops: RecurrentOps, operation: Operation, state: torch.Tensor, chunks: Sequence[Chunk]
) -> list[torch.Tensor]:
    """Compute a step, update ``state``, and return each chunk's outputs."""
    packed = tuple(torch.cat(parts) for parts in zip(*(chunk.tokens for chunk in chunks), strict=True))
    lengths = [chunk.length for chunk in chunks]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    saves = [
        (end - chunk.length + index, slot)
        for end, chunk in zip(ends, chunks, strict=True)
        for index, slot in sorted(chunk.saves.items())
    ]

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    metadata = RecurrentMetadata(
        cu_seqlens=integers([0, *ends]),
        slots=integers([chunk.slot for chunk in chunks]),
        starts=integers([chunk.starts for chunk in chunks]),
        save_tokens=integers([token for token, _ in saves]),
        save_slots=integers([slot for _, slot in saves]),
        num_decodes=next((i for i, length in enumerate(lengths) if length > 1), len(lengths)),
    )
    return list(operation(ops, packed, state, metadata).split(lengths))
