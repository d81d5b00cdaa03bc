"""RecurrentOps: the interface of what a recurrent layer computes between its linear layers. Nothing is computed here.

Each operation goes through the tokens of a sequence in order and carries a state, which it reads from the sequence's
slot and writes back. What a token gets never depends on the other sequences of its step. On CPUs, in float32, and on
GPUs with ``batch_invariant``, neither does it depend on where the chunks of a prompt end: a token's arithmetic is the
same, to the last bit, alone, in a chunk and after a resumption. Else a GPU adds up a prompt of 16-bit tokens in chunks
that begin where the step's part of the prompt does, and its last bits may differ with that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["RecurrentOps"]


class RecurrentOps(ABC):
    """A recurrent layer's operations. They return new tensors and update the states; all states are float32."""

    @abstractmethod
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
        """Convolve each channel with its own weights over the last tokens.

        Args:
            inputs: [num_tokens, channels].
            weight: [channels, width]; the last weight is the token's own.
            bias: [channels].
            state: [num_slots, width - 1, channels], the last inputs, the newest last; zeros before the first token.
            metadata: the step's batch.
            silu: whether SiLU is applied to the sums.

        Returns:
            [num_tokens, channels], in the dtype of ``inputs``; computed in float32.
        """

    @abstractmethod
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
        """Apply the gated delta rule (Yang et al., 2024): S = e^decay S, S += k (beta (v - k S)), output q S.

        Queries and keys are divided by the root of their squares' sum plus 1e-6, and queries by the root of key_dim.

        Args:
            query, key: [num_tokens, num_key_heads, key_dim]; each head serves num_heads // num_key_heads neighbours.
            value: [num_tokens, num_heads, value_dim].
            decay: float32 [num_tokens, num_heads], at most 0; or [num_tokens, num_heads, key_dim], of each row of a
                head's state (Kimi Linear, 2025).
            beta: float32 [num_tokens, num_heads].
            state: [num_slots, num_heads, key_dim, value_dim].
            metadata: the step's batch.

        Returns:
            [num_tokens, num_heads, value_dim], in the dtype of ``value``; computed in float32.
        """

    @abstractmethod
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
        """Apply Mamba 2's recurrence (Dao and Gu, 2024): S = e^(dt A) S + dt x B, output S C + D x.

        Args:
            inputs: x, [num_tokens, num_heads, head_dim].
            steps: dt, float32 [num_tokens, num_heads], after bias, softplus and limits.
            decay: A, float32 [num_heads], negative.
            keys, queries: B and C, [num_tokens, num_groups, state_size]; a group serves neighbouring heads.
            skip: D, float32 [num_heads].
            state: [num_slots, num_heads, head_dim, state_size].
            metadata: the step's batch.

        Returns:
            [num_tokens, num_heads, head_dim], in the dtype of ``inputs``; computed in float32.
        """
