"""Acceptance: how often the draft tokens of each sequence were right, and whether more drafts are worth waiting for."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.sequence import Sequence

__all__ = ["RETRY_TOKENS", "Acceptance"]

_WEIGHT = 0.1  # of the last draft token
_FIRST_RATE = 0.7  # before anything is known
# A sequence that got no draft several times in a row is tried again after this number of tokens.
_MAX_MISSES, RETRY_TOKENS = 4, 16


@dataclass(slots=True)
class _Record:
    rate: float
    num_misses: int = 0  # decodes in a row without a draft


class Acceptance:
    """The share of right draft tokens of each sequence, as an exponentially weighted mean.

    A sequence begins with the mean of all of them.
    """

    def __init__(self) -> None:
        self._mean = _FIRST_RATE
        self._records: WeakKeyDictionary[Sequence, _Record] = WeakKeyDictionary()

    def rate(self, sequence: Sequence) -> float:
        """Return the probability that the next draft token is right."""
        return self._record(sequence).rate

    @property
    def best_rate(self) -> float:
        """The highest rate of any sequence."""
        return max(self._mean, max((record.rate for record in self._records.values()), default=0.0))

    def is_retried(self, sequence: Sequence) -> bool:
        """Whether a sequence whose drafts do not pay gets a token to find out whether they do now."""
        return sequence.num_tokens % RETRY_TOKENS == 0

    def may_get_draft(self, sequence: Sequence) -> bool:
        """Whether the next token may get a draft, so that it is worth knowing it before the next step is scheduled."""
        return self._record(sequence).num_misses < _MAX_MISSES or self.is_retried(sequence)

    def record_draft(self, sequence: Sequence, *, has_draft: bool) -> None:
        """Note whether a sequence got a draft."""
        record = self._record(sequence)
        record.num_misses = 0 if has_draft else record.num_misses + 1

    def record_outcome(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """Note how many tokens of a draft were right. Of those after the first wrong one nothing is known."""
        record = self._record(sequence)
        for index in range(min(num_accepted + 1, num_drafted)):
            is_right = index < num_accepted
            record.rate += _WEIGHT * (is_right - record.rate)
            self._mean += _WEIGHT * (is_right - self._mean)

    def _record(self, sequence: Sequence) -> _Record:
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record(self._mean)
        return record
