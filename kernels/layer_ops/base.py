"""LayerOps: the interface of a decoder layer's operations, and what they take. Nothing is computed here.

Both implementations compute the same function. TorchOps runs on any device, in several launches an operation; TritonOps
runs on a GPU, in one. Models on a CPU mostly run in C instead, whole layers at a time: see kernels/cpu.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch

__all__ = ["Activation", "Addend", "LatentCache", "LayerCache", "LayerOps", "Norm", "Rotation"]

Activation = Literal["silu", "gelu_tanh"]


class Norm(Protocol):
    """An RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) times ``weight``, or times 1 + ``weight``.

    Attributes:
        weight: [width], in the dtype of what is normalized.
        eps: added to the mean square.
        adds_one: whether the factor is 1 + ``weight`` (Gemma).
    """

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def adds_one(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Addend:
    """What an attention or a feed-forward adds to the residual stream: ``scale`` times ``values``, normalized if asked.

    Attributes:
        values: [num_tokens, hidden_size].
        norm: of the values, before they are scaled; None: they are added as they are.
        sum_scale: [1], factor of the sum (Gemma 4's layer scalars); None: 1.
    """

    values: torch.Tensor
    norm: Norm | None = None
    scale: float = 1.0
    sum_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """The angles of RoPE (Su et al., 2021) at the positions of a step's tokens; layers share it.

    Attributes:
        table: cosines and sines of every position, float32 [length, 2, head_dim // 2]; 1 and 0 where nothing rotates.
        positions: int64 [num_tokens].
        dtype: of queries and keys.
    """

    table: torch.Tensor
    positions: torch.Tensor
    dtype: torch.dtype

    @cached_property
    def cos_and_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the step's tokens, rounded to ``dtype``; both [num_tokens, 1, head_dim // 2]."""
        cos, sin = self.table[self.positions].to(self.dtype).unsqueeze(2).unbind(1)
        return cos, sin


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's paged KV cache, and where a step writes to it.

    Attributes:
        keys, values: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; a token whose slot is -1 is not written. None:
            the layer only reads what another one writes.
        key_scale, value_scale: what keys and values, in the queries' dtype, are divided by before they are rounded to a
            cache of FP8: see kernels/cache/fp8.py.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_mapping: torch.Tensor | None
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LatentCache:
    """One layer's paged cache of latents, and where a step writes to it.

    Attributes:
        latents: [num_blocks, block_size, rank + rope_dim], contiguous.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; a token whose slot is -1 is not written.
    """

    latents: torch.Tensor
    slot_mapping: torch.Tensor


class LayerOps(ABC):
    """A decoder layer's operations.

    What a token gets depends on that token alone, to the last bit, however many others are computed with it.
    """

    @abstractmethod
    def add_norm(
        self, residual: torch.Tensor, addend: Addend | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the residual stream and normalize the sum.

        Args:
            residual: [num_tokens, hidden_size].
            addend: None: only normalize.
            norm: None: only add.

        Returns:
            The sum, rounded to its dtype, and the norm of this rounded sum; without a norm the sum twice.
        """

    @abstractmethod
    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        query_norm: Norm | None,
        key_norm: Norm | None,
        rotation: Rotation | None,
        cache: LayerCache,
        value_eps: float | None = None,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, write keys and values to the cache, and return the queries.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], or only num_heads * head_dim if the cache is
                only read; the last dimension is contiguous.
            query_norm, key_norm: over each head if their weights are [head_dim], else over all heads of a token
                together; either both or none.
            rotation: rotates element i of a head with element i + head_dim // 2; None: the layer has no RoPE.
            cache: whose shape says how many KV heads there are.
            value_eps: values are divided by the root of their head's mean square and this epsilon; the same as that of
                the other norms. None: they are stored as they are.

        Returns:
            [num_tokens, num_heads, head_dim].
        """

    @abstractmethod
    def rotate_and_store_latents(
        self,
        query: torch.Tensor,
        rotated: torch.Tensor,
        latent: torch.Tensor,
        norm: Norm,
        rotation: Rotation | None,
        cache: LatentCache,
    ) -> None:
        """Complete the queries of latent attention, and write the step's latents to the cache.

        Args:
            query: [num_tokens, num_heads, rank + rope_dim], contiguous; its last rope_dim elements are written.
            rotated: [num_tokens, num_heads, rope_dim], what they are before the rotation; the last dimension is
                contiguous.
            latent: [num_tokens, rank + rope_dim], latents and then the keys that have positions, neither normalized nor
                rotated; the last dimension is contiguous.
            norm: of the latents, [rank].
            rotation: rotates element i of rope_dim elements with element i + rope_dim // 2; None: nothing is rotated.
            cache: takes the normalized latents and the rotated keys.
        """

    @abstractmethod
    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activated first half of each row times its second half, [num_tokens, width].

        Args:
            gate_up: [num_tokens, 2 * width]; the last dimension is contiguous.
        """
