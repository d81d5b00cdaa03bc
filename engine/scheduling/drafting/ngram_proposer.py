"""NgramProposer: draft tokens that followed an earlier occurrence of the last tokens of a sequence.

It guesses well where a text repeats an earlier part: a quotation, edited code, a list that repeats its keys. The method
is prompt lookup decoding (A. Saxena, 2023), which needs no draft model. This module knows neither the scheduler nor the
model.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from engine.scheduling.drafting.proposer import Proposer
from engine.sequence import Sequence

__all__ = ["NgramIndex", "NgramProposer"]

MAX_TOKENS_AT_ONCE = 2048  # about a millisecond


class NgramIndex:
    """Where the n-grams of one sequence last occurred. Tokens may be added to the sequence, not removed.

    It takes about 0.1 KB of memory for each token and length, and a few microseconds a step, however long the sequence.

    Args:
        shortest, longest: the shortest and the longest n-grams, in tokens.
    """

    __slots__ = ("_ends", "_num_indexed")

    def __init__(self, shortest: int, longest: int) -> None:
        # By length, the longest first: an n-gram's hash -> the index after its latest occurrence. Tuples would take a
        # third more memory than hashes. A comparison of the tokens detects colliding hashes.
        self._ends: dict[int, dict[int, int]] = {length: {} for length in range(longest, shortest - 1, -1)}
        self._num_indexed = 0  # the n-grams that end within this many leading tokens are indexed

    def continuation(self, token_ids: list[int], limit: int) -> list[int]:
        """Return the up to ``limit`` tokens that followed the latest earlier occurrence of the last tokens.

        It searches for the longest n-gram first. If the occurrence overlaps the last tokens or ends where they begin,
        the sequence repeats itself, and the continuation repeats it further.
        """
        self._extend(token_ids)
        for length, ends in self._ends.items():
            last = token_ids[-length:]
            end = ends.get(hash(tuple(last)))
            if end is not None and token_ids[end - length : end] == last:
                period = len(token_ids) - end
                if limit > period <= length:
                    return [token_ids[end + index % period] for index in range(limit)]
                return token_ids[end : end + limit]
        return []

    def _extend(self, token_ids: list[int]) -> None:
        """Index the n-grams that end before the last token; those that end with it are the ones to search for.

        A long prompt is indexed over several steps, so that no step takes long; meanwhile only its start is searched.
        """
        known = self._num_indexed
        last = min(len(token_ids) - 1, known + MAX_TOKENS_AT_ONCE)
        for length, ends in self._ends.items():
            for end in range(max(known + 1, length), last + 1):
                ends[hash(tuple(token_ids[end - length : end]))] = end
        self._num_indexed = last


class NgramProposer(Proposer):
    """Proposes draft tokens by prompt lookup; keeps one index per sequence, for as long as the sequence lives.

    Args:
        shortest, longest: the shortest and the longest n-gram that is compared, in tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._indices: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens that may follow the sequence; none if its last tokens never occurred before."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(self._shortest, self._longest)
        return index.continuation(sequence.token_ids, limit)
