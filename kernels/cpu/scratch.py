"""Scratch: memory of the decoder layers' intermediate results, kept from step to step."""

from __future__ import annotations

import torch

from kernels.cpu.linear import WeightKind, words_per_row
from kernels.cpu.memory import huge_zeros

__all__ = ["Scratch"]


class Scratch:
    """Memory for what lives within a layer: fresh memory in every step would cost its page faults.

    Args:
        kinds: of the weights.
        width: elements of the widest row that a linear layer of the model reads.
        outputs: elements of the widest row that one writes.
        attention_width: elements of a token's queries.
        cache_dtype: of keys and values, and so of queries.
        mixed_width: elements of a token's values in the widest recurrent layer, or of what is beside another output.
    """

    def __init__(
        self,
        *kinds: WeightKind,
        width: int,
        outputs: int,
        attention_width: int,
        cache_dtype: torch.dtype,
        mixed_width: int = 0,
    ) -> None:
        self._num_words = max(words_per_row(kind, width) for kind in kinds)
        self._outputs, self._attention_width, self._cache_dtype = outputs, attention_width, cache_dtype
        self._mixed_width = mixed_width
        self._capacity = 0
        self.reserve(16)

    def reserve(self, num_tokens: int) -> None:
        """Allocate memory for a step of ``num_tokens``, unless a step as large was reserved before."""
        if num_tokens <= self._capacity:
            return
        self.words = huge_zeros((num_tokens * self._num_words,), torch.int32)
        self.row_scales = huge_zeros((num_tokens,), torch.float32)
        self.wide = huge_zeros((num_tokens * self._outputs,), torch.float32)
        self.query, self.attended = (
            huge_zeros((num_tokens * self._attention_width,), self._cache_dtype) for _ in range(2)
        )
        self.mixed = huge_zeros((num_tokens * self._mixed_width,), torch.float32)
        for memory in (self.words, self.row_scales, self.wide, self.query, self.attended, self.mixed):
            memory.zero_()  # the system allocates pages on the first write, and no step should wait for that
        self._capacity = num_tokens
