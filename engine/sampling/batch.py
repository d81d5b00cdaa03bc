"""SamplingBatch: the parameters of the sequences that sample together, as columns on the device.

While the same sequences go on, each by the token it got, the columns are kept and advanced; otherwise they are built
from the sequences, of which they are a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.choice import build_choosers
from engine.sampling.filters import MinTokens, build_filters, column
from engine.sequence import Sequence

__all__ = ["SamplingBatch"]

_token_ids = attrgetter("token_ids")
_constants = attrgetter("params", "seed", "num_prompt_tokens", "stop_token_ids")


class SamplingBatch:
    """The columns of one set of sequences.

    Args:
        sequences: one per row; what they are is kept, to be compared with the next step's.
        vocab_size: columns of the logits.
        device: where the logits are.
        num_candidates: how many of the likeliest tokens top-p looks at before it sorts the vocabulary.
    """

    def __init__(
        self, sequences: Sequence_[Sequence], vocab_size: int, device: torch.device, num_candidates: int
    ) -> None:
        self._device = device
        self._sequences = list(sequences)
        self._constants = list(map(_constants, sequences))
        self._note_tokens(list(map(_token_ids, sequences)))
        self.filters = build_filters(sequences, vocab_size, device)
        self.choosers = build_choosers(sequences, vocab_size, device, num_candidates)
        # Rows with columns that depend on their tokens or how many there are; drafts give only the others several.
        self._counted = np.array([not one.is_plain_greedy for one in sequences], dtype=bool)
        self._needs_history = any(one.needs_history for one in self.filters)
        params = [sequence.params for sequence in sequences]
        self.ranked_rows = [row for row, p in enumerate(params) if p.needs_logprobs]
        self.num_logprobs = [params[row].logprobs or 0 for row in self.ranked_rows]
        self.ranked_index = column(self.ranked_rows, torch.int64, device)
        self.beam_rows = [row for row, p in enumerate(params) if p.uses_beam_search]
        beams = [sequences[row] for row in self.beam_rows]
        self.num_beam_tokens = [s.params.num_sequences + len(s.stop_token_ids) for s in beams]
        self.beam_index = column(self.beam_rows, torch.int64, device)
        self.beam_min_tokens = MinTokens.build(beams, vocab_size, device)

    def _note_tokens(self, token_ids: list[list[int]]) -> None:
        self._lengths = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
        self._last_ids = list(map(itemgetter(-1), token_ids))

    def advance(self, sequences: Sequence_[Sequence]) -> bool:
        """Step on if these are the same sequences, each with one more token; False if the batch must be built anew.
        Those that take the likeliest token whatever came before may have got several.

        The new token is read from the sequence, so it need not be the one that was sampled. That the tokens before it
        are the same is checked by their number and, where it matters, the last of them: a sequence whose earlier tokens
        are rewritten in place needs ``Sampler.reset``.
        """
        if list(sequences) != self._sequences:  # by identity: they are kept alive here
            return False
        token_ids = list(map(_token_ids, sequences))
        lengths = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
        if list(map(_constants, sequences)) != self._constants:
            return False
        if not np.array_equal(lengths, self._lengths + 1) and not self._is_by_drafts(lengths):
            return False
        if self._needs_history and not self._follows(token_ids):
            return False
        self._note_tokens(token_ids)
        new_ids = column(self._last_ids if self._needs_history else [], torch.int64, self._device)
        for one in self.filters:
            one.advance(new_ids)
        for chooser in self.choosers:
            chooser.advance()
        if self.beam_min_tokens is not None:
            self.beam_min_tokens.advance(new_ids)
        return True

    def _is_by_drafts(self, lengths: npt.NDArray[np.int64]) -> bool:
        """Whether all have grown, and only those by several tokens to whom it makes no difference."""
        grown = lengths - self._lengths
        return bool((grown > 0).all() and (grown[self._counted] == 1).all())

    def _follows(self, token_ids: list[list[int]]) -> bool:
        """Whether what came before the new tokens is what was there, in the rows to which it matters."""
        before = list(map(itemgetter(-2), token_ids))
        if before == self._last_ids:
            return True
        rows = zip(before, self._last_ids, self._counted.tolist(), strict=True)
        return all(token_id == last for token_id, last, counts in rows if counts)
