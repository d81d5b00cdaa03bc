"""LogitFilters: change logits as a request's parameters say, before a token is chosen from them.

Each filter serves the sequences of a batch that use its parameter, and changes their logits. A batch has only the
filters that some sequence uses. The state of a filter is a pure function of its sequences: it is built from them when
the batch changes, and advanced by each new token otherwise. State that depends on whole histories is kept when the
batch changes (token_rows.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as GenericSequence
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from engine.options.thinking_budget import ENDED, NOT_STARTED
from engine.sampling.token_rows import TokenRows
from engine.sequence import Sequence
from engine.structured_outputs.bitmask import forbidden_tokens
from kernels.device_copy import to_device
from kernels.sampling.base import ANY_TOKEN
from kernels.sampling.select import select_sampling_ops

__all__ = ["LogitFilter", "MinTokens", "build_filters"]


def _ids(values: object, device: torch.device) -> torch.Tensor:
    return to_device(values, torch.int64, device)


def _add(logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, amounts: torch.Tensor) -> None:
    """Add amounts to ``logits[indices, token_ids]``, which are all different; each [num_pairs].

    On a GPU, ``index_put_(accumulate=True)`` would sort the indices, and some versions of torch wait to check them.
    """
    logits.index_put_((indices, token_ids), logits[indices, token_ids] + amounts)


def _bitmask(allowed: GenericSequence[GenericSequence[int]], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a bitmask of each list of token ids, as ``fill_bitmask`` does of grammars."""
    words = np.empty((len(allowed), -(-vocab_size // 32)), dtype=np.int32)
    for row, token_ids in zip(words, allowed, strict=True):
        is_allowed = np.zeros(32 * len(row), dtype=bool)
        is_allowed[np.fromiter(token_ids, np.int64, len(token_ids))] = True
        row[:] = np.packbits(is_allowed, bitorder="little").view(np.int32)
    return words


def _pairs(token_ids: GenericSequence[GenericSequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each of the concatenated token ids which list it comes from, and the ids, both int64."""
    lengths = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
    flat = np.fromiter(chain.from_iterable(token_ids), np.int64, int(lengths.sum()))
    return _ids(np.repeat(np.arange(len(token_ids)), lengths), device), _ids(flat, device)


class LogitFilter(ABC):
    """One kind of change to the logits of those sequences that ask for it."""

    needs_history: bool = False  # whether it depends on which tokens a sequence has, not only on how many

    @classmethod
    @abstractmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        """Return the filter for a batch; None if no sequence uses it."""

    def serve(self, sequences: GenericSequence[Sequence], known: Mapping[Sequence, int]) -> bool:
        """Serve another batch, and keep what depends on the ``known`` tokens of sequences: see ``build_filters``.

        False if no sequence uses the filter, or if ``build`` makes a new one as cheaply.
        """
        return False

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits``, float32 [batch_size, vocab_size], in this tensor."""

    def advance(self, token_ids: torch.Tensor) -> None:  # noqa: B027  (most have nothing to do)
        """Advance by one new token for each sequence, int64 [batch_size]; empty if no filter needs the history."""


class AllowedTokens(LogitFilter):
    """allowed_token_ids: forbids every other token."""

    def __init__(self, indices: torch.Tensor, bitmask: torch.Tensor, vocab_size: int) -> None:
        self._indices = indices  # int64 [n]
        self._ops = select_sampling_ops(indices.device.type)
        self._bitmask = bitmask  # int32 [n, ceil(vocab_size / 32)]
        # bool [n, vocab_size], for torch: unpacked once
        self._forbidden = forbidden_tokens(bitmask, vocab_size) if self._ops is None else None

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        indices = [index for index, s in enumerate(sequences) if s.params.allowed_token_ids is not None]
        if not indices:
            return None
        bitmask = _bitmask([sequences[index].params.allowed_token_ids or () for index in indices], vocab_size)
        return cls(_ids(indices, device), to_device(bitmask, torch.int32, device), vocab_size)

    def apply(self, logits: torch.Tensor) -> None:
        if self._forbidden is not None:
            picked = logits.index_select(0, self._indices).masked_fill_(self._forbidden, -torch.inf)
            logits.index_copy_(0, self._indices, picked)
        elif self._ops is not None:
            self._ops.apply_bitmask(logits, self._indices, self._bitmask)


class BadWords(LogitFilter):
    """bad_words_token_ids: forbids the last token of a word after its other tokens.

    As in transformers, those may be in the prompt.
    """

    _NONE = -2  # is not a token id

    def __init__(
        self,
        indices: torch.Tensor,
        words: torch.Tensor,
        owners: torch.Tensor,
        targets: torch.Tensor,
        pairs: tuple[torch.Tensor, torch.Tensor],
        tails: torch.Tensor,
        last_tokens: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._indices = indices  # int64 [n]: indices of the batch
        self._words = words  # int64 [num_words, longest - 1]: all but the last token, padded with ANY_TOKEN on the left
        self._owners = owners  # int64 [num_words]: index into _indices
        self._targets = targets  # int64 [num_words]: index into _pairs of the word's last token
        self._pairs = pairs  # both int64 [num_pairs]: index of the batch and token id; words may share one
        self._tails = tails  # int64 [n, longest - 1]: last tokens, padded with _NONE on the left
        self._last_tokens = last_tokens  # both int64 [num_words]: the same as the pairs, of each word
        self.needs_history = words.shape[1] > 0  # words of one token never change

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        indices = [index for index, s in enumerate(sequences) if s.params.bad_words_token_ids]
        if not indices:
            return None
        words = [
            (i, word) for i, index in enumerate(indices) for word in sequences[index].params.bad_words_token_ids or ()
        ]
        width = max(len(word) for _, word in words) - 1
        tails = [sequences[index].token_ids[-width:] if width else [] for index in indices]
        last_tokens = [(indices[owner], word[-1]) for owner, word in words]
        pairs = {pair: number for number, pair in enumerate(dict.fromkeys(last_tokens))}
        return cls(
            indices=_ids(indices, device),
            words=_ids([[ANY_TOKEN] * (width + 1 - len(word)) + list(word[:-1]) for _, word in words], device),
            owners=_ids([owner for owner, _ in words], device),
            targets=_ids([pairs[pair] for pair in last_tokens], device),
            pairs=(_ids([index for index, _ in pairs], device), _ids([token_id for _, token_id in pairs], device)),
            tails=_ids([[cls._NONE] * (width - len(tail)) + tail for tail in tails], device),
            last_tokens=(_ids([i for i, _ in last_tokens], device), _ids([token for _, token in last_tokens], device)),
        )

    def apply(self, logits: torch.Tensor) -> None:
        ops = select_sampling_ops(logits.device.type)
        if ops is not None:
            ops.forbid_words(logits, *self._last_tokens, self._words, self._owners, self._tails)
            return
        equal = (self._words == self._tails[self._owners]) | (self._words == ANY_TOKEN)
        penalty = torch.zeros(len(equal), device=logits.device).masked_fill_(equal.all(dim=1), -torch.inf)
        # Added up, because two words may have the same last token and only one of them may match.
        _add(
            logits,
            *self._pairs,
            torch.zeros_like(self._pairs[0], dtype=torch.float32).scatter_add_(0, self._targets, penalty),
        )

    def advance(self, token_ids: torch.Tensor) -> None:
        if self.needs_history:
            self._tails = torch.cat((self._tails[:, 1:], token_ids[self._indices, None]), dim=1)


class MinTokens(LogitFilter):
    """min_tokens: forbids stop tokens until this many tokens are generated."""

    def __init__(
        self, indices: torch.Tensor, token_ids: torch.Tensor, missing: torch.Tensor, most_missing: int
    ) -> None:
        self._indices, self._token_ids = indices, token_ids  # int64 [num_pairs]
        self._missing = missing  # int64 [num_pairs]: tokens to generate before this stop token is allowed
        self._most_missing = most_missing

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        missing = [s.params.min_tokens - s.num_output_tokens for s in sequences]
        indices = [index for index, s in enumerate(sequences) if missing[index] > 0 and s.stop_token_ids]
        if not indices:
            return None
        owners, token_ids = _pairs([tuple(sequences[index].stop_token_ids) for index in indices], device)
        most = min(max(missing[index] for index in indices), 2**62)
        counts = _ids([min(missing[index], 2**62) for index in indices], device)
        return cls(_ids(indices, device)[owners], token_ids, counts[owners], most)

    def apply(self, logits: torch.Tensor) -> None:
        ops = select_sampling_ops(logits.device.type)
        if self._most_missing <= 0:
            return
        if ops is not None:
            ops.forbid_tokens(logits, self._indices, self._token_ids, self._missing)
        else:
            penalty = torch.zeros(len(self._indices), device=logits.device)
            penalty.masked_fill_(self._missing > 0, -torch.inf)
            _add(logits, self._indices, self._token_ids, penalty)

    def advance(self, token_ids: torch.Tensor) -> None:
        self._missing -= 1
        self._most_missing -= 1


class LogitBias(LogitFilter):
    """logit_bias: a number added to a token's logit."""

    def __init__(self, indices: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor) -> None:
        self._indices, self._token_ids = indices, token_ids  # int64 [num_pairs]
        self._biases = biases  # float32 [num_pairs]

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        biases = [s.params.logit_bias or {} for s in sequences]
        if not any(biases):
            return None
        indices, token_ids = _pairs([tuple(bias) for bias in biases], device)
        values = [value for bias in biases for value in bias.values()]
        return cls(indices, token_ids, to_device(values, torch.float32, device))

    def apply(self, logits: torch.Tensor) -> None:
        ops = select_sampling_ops(logits.device.type)
        add = _add if ops is None else ops.add_biases
        add(logits, self._indices, self._token_ids, self._biases)


class RepetitionPenalty(LogitFilter):
    """repetition_penalty: tokens of the prompt and the output become less likely (Keskar et al., 2019)."""

    needs_history = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen = TokenRows(vocab_size, torch.bool, counts_prompt=True, device=device)
        self._penalties = torch.empty(0, 1, device=device)  # float32 [n, 1]

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        built = cls(vocab_size, device)
        return built if built.serve(sequences, {}) else None

    def serve(self, sequences: GenericSequence[Sequence], known: Mapping[Sequence, int]) -> bool:
        served = [(index, s) for index, s in enumerate(sequences) if s.params.repetition_penalty != 1.0]
        if served:
            self._seen.serve(served, known)
            penalties = [[sequence.params.repetition_penalty] for sequence in self._seen.sequences]
            self._penalties = to_device(penalties, torch.float32, self._penalties.device)
        return bool(served)

    def apply(self, logits: torch.Tensor) -> None:
        ops = select_sampling_ops(logits.device.type)
        if ops is not None:
            ops.penalise_repetition(logits, self._seen.indices, self._seen.values, self._penalties)
            return
        picked = logits.index_select(0, self._seen.indices)
        penalised = torch.where(picked > 0, picked / self._penalties, picked * self._penalties)
        logits.index_copy_(0, self._seen.indices, torch.where(self._seen.values, penalised, picked))

    def advance(self, token_ids: torch.Tensor) -> None:
        self._seen.advance(token_ids)


class OutputPenalties(LogitFilter):
    """frequency_penalty and presence_penalty: tokens become less likely each time, or once, they were generated."""

    needs_history = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = TokenRows(vocab_size, torch.int32, counts_prompt=False, device=device)
        self._frequency = self._presence = torch.empty(0, 1, device=device)  # float32 [n, 1]

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        built = cls(vocab_size, device)
        return built if built.serve(sequences, {}) else None

    def serve(self, sequences: GenericSequence[Sequence], known: Mapping[Sequence, int]) -> bool:
        served = [
            (index, s)
            for index, s in enumerate(sequences)
            if s.params.frequency_penalty != 0.0 or s.params.presence_penalty != 0.0
        ]
        if served:
            self._counts.serve(served, known)
            sequences, device = self._counts.sequences, self._frequency.device
            frequency = [[sequence.params.frequency_penalty] for sequence in sequences]
            presence = [[sequence.params.presence_penalty] for sequence in sequences]
            self._frequency = to_device(frequency, torch.float32, device)
            self._presence = to_device(presence, torch.float32, device)
        return bool(served)

    def apply(self, logits: torch.Tensor) -> None:
        counts, ops = self._counts.values, select_sampling_ops(logits.device.type)
        if ops is not None:
            ops.penalise_counts(logits, self._counts.indices, counts, self._frequency, self._presence)
            return
        picked = logits.index_select(0, self._counts.indices)
        picked -= self._frequency * counts
        picked -= self._presence * (counts > 0)
        logits.index_copy_(0, self._counts.indices, picked)

    def advance(self, token_ids: torch.Tensor) -> None:
        self._counts.advance(token_ids)


class ThinkingLimit(LogitFilter):
    """thinking_budget: forces the end of reasoning that has used its budget."""

    needs_history = True

    def __init__(
        self, indices: torch.Tensor, limits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, used: torch.Tensor
    ) -> None:
        self._indices = indices  # int64 [n]
        self._limits = limits  # int64 [n]
        self._starts = starts  # int64 [n]; NOT_STARTED for none
        self._ends = ends  # int64 [n]
        self._used = used  # int64 [n]: tokens of reasoning, NOT_STARTED or ENDED

    @classmethod
    def build(cls, sequences: GenericSequence[Sequence], vocab_size: int, device: torch.device) -> Self | None:
        served = [(index, s, s.params.thinking_budget) for index, s in enumerate(sequences)]
        budgets = [(index, s, budget) for index, s, budget in served if budget is not None]
        if not budgets:
            return None
        starts = [NOT_STARTED if budget.start_token_id is None else budget.start_token_id for _, _, budget in budgets]
        return cls(
            indices=_ids([index for index, _, _ in budgets], device),
            limits=_ids([budget.num_tokens for _, _, budget in budgets], device),
            starts=_ids(starts, device),
            ends=_ids([budget.end_token_id for _, _, budget in budgets], device),
            used=_ids([budget.num_thinking_tokens(s.output_token_ids) for _, s, budget in budgets], device),
        )

    def apply(self, logits: torch.Tensor) -> None:
        picked = logits.index_select(0, self._indices)
        forced = torch.full_like(picked, -torch.inf).scatter_(1, self._ends[:, None], 0.0)
        is_over = (self._used >= 0) & (self._used >= self._limits)
        logits.index_copy_(0, self._indices, torch.where(is_over[:, None], forced, picked))

    def advance(self, token_ids: torch.Tensor) -> None:
        new = token_ids[self._indices]
        is_thinking = self._used >= 0
        self._used += is_thinking
        self._used.masked_fill_(is_thinking & (new == self._ends), ENDED)
        self._used.masked_fill_((self._used == NOT_STARTED) & (new == self._starts), 0)


# In the order in which vLLM's V1 engine applies them; the end of reasoning overrides them all.
_FILTERS: tuple[type[LogitFilter], ...] = (
    AllowedTokens,
    BadWords,
    MinTokens,
    LogitBias,
    RepetitionPenalty,
    OutputPenalties,
    ThinkingLimit,
)


def build_filters(
    sequences: GenericSequence[Sequence],
    vocab_size: int,
    device: torch.device,
    previous: Iterable[LogitFilter] = (),
    known: Mapping[Sequence, int] | None = None,
) -> list[LogitFilter]:
    """Return the filters that a batch needs, in the order in which they apply.

    Args:
        sequences: the batch.
        vocab_size: width of the logits.
        device: device of the logits.
        previous: filters of the last batch. Some of them serve this one; do not use them afterwards.
        known: the sequences of the last batch that still begin with the same tokens, and how many tokens they had then.
    """
    by_type = {type(logit_filter): logit_filter for logit_filter in previous}
    filters: list[LogitFilter] = []
    for kind in _FILTERS:
        logit_filter: LogitFilter | None = by_type.get(kind)
        if logit_filter is None or not logit_filter.serve(sequences, known or {}):
            logit_filter = kind.build(sequences, vocab_size, device)
        if logit_filter is not None:
            filters.append(logit_filter)
    return filters
