"""ChunkedDraftModel: which tokens of which sequences the draft model computes in a pass, on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.scheduling.drafting.draft_model import ModelDrafts
from engine.sequence import Sequence
from engine.worker.drafting.draft_decoder import DraftDecoder
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from engine.worker.drafting.prefix_marks import PrefixMarks

__all__ = ["Chunk", "ChunkedDraftModel"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of a sequence that a pass computes."""

    token_ids: list[int]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    block_table: list[int]  # the sequence's own list

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence up to the chunk's end."""
        return int(self.positions[-1]) + 1


class ChunkedDraftModel(ABC):
    """A loaded draft model with its part of the KV cache; what all devices share.

    Args:
        decoder: the model, loaded.
        marks: of the tokens that it has computed.
        block_size: tokens per block.
        weight_bytes: of the large model.
        max_pass_tokens: tokens of one forward pass, at most.
    """

    def __init__(
        self,
        decoder: DraftDecoder | HiddenStateDecoder,
        marks: PrefixMarks,
        block_size: int,
        *,
        weight_bytes: int,
        max_pass_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._marks = marks
        self._block_size = block_size
        self._max_pass_tokens = max_pass_tokens
        self.max_len = decoder.max_len
        self.share = decoder.model.num_bytes / max(weight_bytes, 1)
        self.free_tokens = decoder.free_tokens

    def num_computed(self, sequence: Sequence) -> int:
        """Return the leading tokens of a running sequence that it need not compute again."""
        return self._marks.num_computed(sequence)

    def fill(self, ends: Mapping[Sequence, int], max_tokens: int | None = None) -> ModelDrafts:
        """Compute the tokens of sequences that it lacks, up to these of each, as far as one pass computes them."""
        drafts, chunks, num_left = ModelDrafts(), list[Chunk](), self._max_pass_tokens
        if max_tokens is not None:
            num_left = min(num_left, max_tokens)
        for sequence, end in ends.items():
            first = self.num_computed(sequence)  # those that a chunk before this one computes are marked
            if end > first and num_left:
                chunks.append(self._chunk(sequence, [], first, min(end, first + num_left)))
                num_left -= chunks[-1].num_tokens
        if chunks:
            drafts.passes += self._fill(chunks)
        return drafts

    @abstractmethod
    def _fill(self, chunks: list[Chunk]) -> list[tuple[int, float]]:
        """Compute chunks and sample nothing; return the pass, or none if its time is not known."""

    def _catch_up(self, sequences: list[Sequence]) -> list[tuple[int, float]]:
        """Compute what the last chunks of all sequences have too much for one pass; return the passes."""
        passes: list[tuple[int, float]] = []
        ends = {sequence: sequence.num_tokens - 1 for sequence in sequences}
        while True:
            num_tokens = sum(1 + max(0, end - self.num_computed(sequence)) for sequence, end in ends.items())
            if num_tokens <= self._max_pass_tokens:
                return passes
            passes += self.fill(ends, num_tokens - self._max_pass_tokens).passes

    def _last_chunk(self, sequence: Sequence) -> Chunk:
        """Return the tokens of a sequence that it lacks, and the last one in any case: the draft follows its logits.

        The blocks may be those of an ended sequence that began with the same tokens, and have all of them.
        """
        end = sequence.num_tokens
        return self._chunk(sequence, [], min(self.num_computed(sequence), end - 1), end)

    def _chunk(self, sequence: Sequence, draft: list[int], first: int, end: int) -> Chunk:
        """Return the tokens from index ``first`` to ``end`` of a sequence and a draft after it, and mark them.

        The marks of a batch are written before it is computed: as every layer writes its keys and values first, a later
        chunk of the batch may read those of an earlier one.
        """
        positions = np.arange(first, end)
        slots = slots_of(sequence.block_table, positions, self._block_size)
        self._marks.write(sequence, first, draft, slots)
        num_known = len(sequence.token_ids)
        token_ids = sequence.token_ids[first:end] + draft[max(first - num_known, 0) : max(end - num_known, 0)]
        return Chunk(token_ids, positions, slots, sequence.block_table)


def slots_of(block_table: list[int], positions: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of the KV cache of a sequence's tokens at these positions, which are consecutive."""
    first, last = int(positions[0]) // block_size, int(positions[-1]) // block_size
    held = np.array(block_table[first : last + 1], dtype=np.int64)
    return held[positions // block_size - first] * block_size + positions % block_size
