"""TokenRows: which tokens each sequence of a filter has, or how often, as a matrix that outlives the batch.

A batch changes whenever a sequence joins or ends. Then the rows of all other sequences stay where they are. Only their
new tokens, and the whole history of sequences that join, are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as GenericSequence
from itertools import chain

import numpy as np
import torch

from engine.sequence import Sequence
from kernels.device_copy import to_device

__all__ = ["TokenRows", "bytes_of_histories"]

_GROWTH = 1.25  # of the memory for rows, so that they are seldom copied


def bytes_of_histories(num_sequences: int, vocab_size: int) -> int:
    """Return the most bytes of the rows of sequences that have every penalty, between two steps."""
    bytes_per_token = torch.bool.itemsize + torch.int32.itemsize  # whether and how often each sequence has it
    return max(num_sequences, int(_GROWTH * num_sequences)) * vocab_size * bytes_per_token


class TokenRows:
    """One row of the vocabulary for each sequence that a filter serves.

    Args:
        vocab_size: width of a row.
        dtype: bool notes which tokens a sequence has, int32 how often.
        counts_prompt: whether tokens of the prompt count.
        device: device of the logits.

    Attributes:
        indices: int64 [num_rows]: the index in the batch of each row's sequence.
        sequences: of each row.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, *, counts_prompt: bool, device: torch.device) -> None:
        self.indices = torch.empty(0, dtype=torch.int64, device=device)
        self.sequences: list[Sequence] = []
        self._counts_prompt = counts_prompt
        self._memory = torch.zeros(0, vocab_size, dtype=dtype, device=device)

    @property
    def values(self) -> torch.Tensor:
        """[num_rows, vocab_size]."""
        return self._memory[: len(self.sequences)]

    def serve(self, served: GenericSequence[tuple[int, Sequence]], known: Mapping[Sequence, int]) -> None:
        """Serve these sequences from now on.

        Args:
            served: indices of the batch, and the sequences.
            known: how many tokens are in the rows of sequences that still begin with these tokens; other rows are
                written again.
        """
        num_rows, device = len(served), self._memory.device
        index_of = {sequence: index for index, sequence in served}
        kept = {
            sequence: row for row, sequence in enumerate(self.sequences) if sequence in index_of and sequence in known
        }
        holes = sorted(set(range(num_rows)) - set(kept.values()))
        self._reserve(num_rows)
        # Rows after the new end move into holes; new sequences get the others.
        moved = [sequence for sequence, row in kept.items() if row >= num_rows]
        if moved:
            sources = to_device([kept[sequence] for sequence in moved], torch.int64, device)
            targets = to_device(holes[: len(moved)], torch.int64, device)
            self._memory.index_copy_(0, targets, self._memory.index_select(0, sources))
            kept.update(zip(moved, holes, strict=False))
        free = holes[len(moved) :]
        if free:
            self._memory.index_fill_(0, to_device(free, torch.int64, device), 0)
        rows = kept | dict(zip((sequence for _, sequence in served if sequence not in kept), free, strict=True))
        self.sequences = sorted(rows, key=rows.__getitem__)
        self.indices = to_device([index_of[sequence] for sequence in self.sequences], torch.int64, device)
        self._add(
            [self._missing(sequence, known.get(sequence, 0) if sequence in kept else 0) for sequence in self.sequences]
        )

    def advance(self, token_ids: torch.Tensor) -> None:
        """Count one new token of each sequence of the batch, int64 [batch_size]."""
        new = token_ids[self.indices, None]
        if self._memory.dtype == torch.bool:
            self.values.scatter_(1, new, True)
        else:
            self.values.scatter_add_(1, new, torch.ones_like(new, dtype=self._memory.dtype))

    def _missing(self, sequence: Sequence, num_known: int) -> list[int]:
        """Return the tokens of a sequence that its row does not count yet."""
        start = num_known if self._counts_prompt else max(num_known, sequence.num_prompt_tokens)
        return sequence.token_ids[start:]

    def _add(self, token_ids: list[list[int]]) -> None:
        lengths = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
        flat = np.fromiter(chain.from_iterable(token_ids), np.int64, int(lengths.sum()))
        rows = np.repeat(np.arange(len(token_ids)), lengths)
        device = self._memory.device
        self._count(to_device(rows, torch.int64, device), to_device(flat, torch.int64, device))

    def _count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count tokens of these rows, each int64 [n]; pairs may be there several times."""
        flat = self._memory.view(-1)
        positions = rows * self._memory.shape[1] + token_ids
        if self._memory.dtype == torch.bool:
            flat.index_fill_(0, positions, True)
        else:
            flat.scatter_add_(0, positions, torch.ones_like(positions, dtype=self._memory.dtype))

    def _reserve(self, num_rows: int) -> None:
        """Grow to ``num_rows`` at least."""
        old = self._memory
        if num_rows > len(old):
            self._memory = old.new_zeros(max(num_rows, int(_GROWTH * len(old))), old.shape[1])
            self._memory[: len(self.sequences)] = old[: len(self.sequences)]
