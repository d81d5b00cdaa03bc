"""SamplingBatch: the parameters of the sequences that sample together, as columns on the device.

The columns are a pure function of the sequences. While the same sequences sample step after step, the batch is kept and
advanced by each sequence's new token; otherwise a new batch is built. It takes over those filters of the last batch
that keep the history of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.choosers import TruncatedDraw, build_choosers
from engine.sampling.filters import MinTokens, build_filters
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kernels.device_copy import to_device

__all__ = ["ListedTokens", "SamplingBatch"]

_token_ids = attrgetter("token_ids")
_num_pending = attrgetter("num_pending")
_constants = attrgetter("params", "seed", "num_prompt_tokens", "stop_token_ids")


def _lengths(sequences: GenericSequence[Sequence]) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each sequence, with the pending one."""
    known = np.fromiter((len(sequence.token_ids) for sequence in sequences), np.int64, len(sequences))
    return known + np.fromiter(map(_num_pending, sequences), np.int64, len(sequences))


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """The tokens of ``logprob_token_ids``."""

    indices: list[int]  # of the sequences that list tokens, among those with log-probabilities
    indices_on_device: torch.Tensor  # int64 [n]
    token_ids: torch.Tensor  # int64 [n, k], padded with 0
    counts: list[int]  # [n]: tokens of each sequence

    @classmethod
    def build(cls, params: GenericSequence[SamplingParams], device: torch.device) -> ListedTokens | None:
        """Return the tokens of the sequences with log-probabilities; None if no sequence lists any."""
        listed = [
            (index, ids) for index, sequence_params in enumerate(params) if (ids := sequence_params.logprob_token_ids)
        ]
        if not listed:
            return None
        indices, counts = [index for index, _ in listed], [len(ids) for _, ids in listed]
        padded = [[*ids, *[0] * (max(counts) - len(ids))] for _, ids in listed]
        rows, token_ids = to_device(indices, torch.int64, device), to_device(padded, torch.int64, device)
        return cls(indices, rows, token_ids, counts)


class SamplingBatch:
    """The columns of one set of sequences.

    Args:
        sequences: one for each index of the logits.
        vocab_size: width of the logits.
        device: device of the logits.
        num_candidates: how many of the most likely tokens top-p tries before it sorts the vocabulary; torch only.
        previous: the last batch, whose filters this one takes over; it must not be used afterwards.
    """

    def __init__(
        self,
        sequences: GenericSequence[Sequence],
        vocab_size: int,
        device: torch.device,
        num_candidates: int,
        previous: SamplingBatch | None = None,
    ) -> None:
        self._device = device
        self._sequences = list(sequences)
        self._constants = list(map(_constants, sequences))
        self._note_tokens(list(map(_token_ids, sequences)), _lengths(sequences))
        if previous is None:
            self.filters = build_filters(sequences, vocab_size, device)
        else:
            self.filters = build_filters(sequences, vocab_size, device, previous.filters, previous._known_tokens())
        self.choosers = build_choosers(sequences, vocab_size, device, num_candidates)
        # Sequences whose columns depend on their tokens, or on their number.
        self._depends_on_tokens = [not sequence.is_plain_greedy for sequence in sequences]
        self._needs_history = any(logit_filter.needs_history for logit_filter in self.filters)
        params = [sequence.params for sequence in sequences]
        self.logprob_indices = [index for index, p in enumerate(params) if p.needs_logprobs]
        self.num_logprobs = [params[index].logprobs or 0 for index in self.logprob_indices]
        self.logprob_indices_on_device = to_device(self.logprob_indices, torch.int64, device)
        self.listed = ListedTokens.build([params[index] for index in self.logprob_indices], device)
        self.beam_indices = [index for index, p in enumerate(params) if p.uses_beam_search]
        beams = [sequences[index] for index in self.beam_indices]
        self.num_beam_tokens = [s.params.num_sequences + len(s.stop_token_ids) for s in beams]
        self.beam_indices_on_device = to_device(self.beam_indices, torch.int64, device)
        self.beam_min_tokens = MinTokens.build(beams, vocab_size, device)

    def truncated_draw(self) -> TruncatedDraw | None:
        """Return the chooser that may leave sequences undecided, as it is in this step; None if the batch has none."""
        truncated = (
            chooser for chooser in self.choosers if isinstance(chooser, TruncatedDraw) and chooser.may_be_undecided
        )
        return next(map(copy, truncated), None)

    def _note_tokens(self, token_ids: list[list[int]], lengths: npt.NDArray[np.int64]) -> None:
        self._lengths = lengths
        self._last_ids = list(map(itemgetter(-1), token_ids))

    def advance(self, sequences: GenericSequence[Sequence]) -> bool:
        """Advance by one step if these are the same sequences, each with one more token; else return False.

        The new token is read from the sequence, so it can be another one than was sampled. The tokens before it are
        compared by their number and, where a filter depends on them, by the last one. If earlier tokens of a sequence
        are rewritten in place, the caller must call ``Sampler.reset``.

        A pending token counts. No filter needs to know which one it is: the scheduler leaves a sequence whose filters
        need its history out of the batch while its last token is pending.
        """
        if list(sequences) != self._sequences:  # by identity: they are kept alive here
            return False
        token_ids, lengths = list(map(_token_ids, sequences)), _lengths(sequences)
        if list(map(_constants, sequences)) != self._constants:
            return False
        if not np.array_equal(lengths, self._lengths + 1):
            return False
        if self._needs_history and (any(map(_num_pending, sequences)) or not self._continues(token_ids)):
            return False
        self._note_tokens(token_ids, lengths)
        self._advance(to_device(self._last_ids if self._needs_history else [], torch.int64, self._device))
        return True

    def advance_on_device(self, token_ids: torch.Tensor) -> None:
        """Advance by one step without the sequences, which do not have their new tokens yet.

        The batch can then be advanced in this way only: it no longer is that of its sequences.

        Args:
            token_ids: the new tokens, int64 [batch_size], on the device; negative ones count as token 0.
        """
        self._advance(token_ids.clamp(min=0) if self._needs_history else token_ids[:0])

    def _advance(self, new_ids: torch.Tensor) -> None:
        for logit_filter in self.filters:
            logit_filter.advance(new_ids)
        for chooser in self.choosers:
            chooser.advance()
        if self.beam_min_tokens is not None:
            self.beam_min_tokens.advance(new_ids)

    def _known_tokens(self) -> dict[Sequence, int]:
        """Return the sequences that still begin with the tokens of the last step, and how many tokens those were.

        As in ``advance``, only the last of these tokens and the constants are compared.
        """
        noted = zip(self._sequences, self._lengths.tolist(), self._last_ids, self._constants, strict=True)
        return {
            sequence: length
            for sequence, length, last_id, constants in noted
            if len(sequence.token_ids) >= length
            and sequence.token_ids[length - 1] == last_id
            and _constants(sequence) == constants
        }

    def _continues(self, token_ids: list[list[int]]) -> bool:
        """Whether the tokens before the new ones are the last step's, where the columns depend on them."""
        before = list(map(itemgetter(-2), token_ids))
        if before == self._last_ids:
            return True
        compared = zip(before, self._last_ids, self._depends_on_tokens, strict=True)
        return all(token_id == last for token_id, last, matters in compared if matters)
