"""NgramProposer: guesses that a sequence goes on as it did when its last tokens occurred before.

That is how copies look: a quoted passage, code that is edited, a list that repeats its keys. The method is prompt
lookup decoding (A. Saxena, 2023); no draft model is needed. It knows nothing of the scheduler or of the model.
"""

from __future__ import annotations

from engine.sequence import Sequence

__all__ = ["NgramIndex", "NgramProposer"]

MAX_TOKENS_AT_ONCE = 2048  # about a millisecond


class NgramIndex:
    """Where the n-grams of one sequence have last occurred. Tokens may be added to the sequence, not taken back.

    It takes about 0.1 KB of memory for each token and length, and a few microseconds a step, however long the sequence.

    Args:
        shortest, longest: how many tokens the n-grams have.
    """

    __slots__ = ("_ends", "_num_indexed")

    def __init__(self, shortest: int, longest: int) -> None:
        # By length, the longest first: an n-gram's hash -> the index behind its latest occurrence. Tuples would take a
        # third more memory than hashes; one that collides is found out when the tokens are compared.
        self._ends: dict[int, dict[int, int]] = {length: {} for length in range(longest, shortest - 1, -1)}
        self._num_indexed = 0  # n-grams that end within so many tokens are known

    def continuation(self, token_ids: list[int], limit: int) -> list[int]:
        """Return the up to ``limit`` tokens that followed the latest earlier occurrence of the last tokens.

        Of those that occurred before, the longest n-gram counts. Where its occurrence overlaps the last tokens or ends
        where they begin, the sequence repeats itself, and goes on to.
        """
        self._extend(token_ids)
        for length, ends in self._ends.items():
            last = token_ids[-length:]
            end = ends.get(hash(tuple(last)))
            if end is not None and token_ids[end - length : end] == last:
                period = len(token_ids) - end
                if limit > period <= length:
                    return [token_ids[end + place % period] for place in range(limit)]
                return token_ids[end : end + limit]
        return []

    def _extend(self, token_ids: list[int]) -> None:
        """Take in the n-grams up to the last token, but those that end with it, which are what is looked for.

        A long prompt takes several steps, so that its first one holds nobody up; until then its beginning is searched.
        """
        known = self._num_indexed
        last = min(len(token_ids) - 1, known + MAX_TOKENS_AT_ONCE)
        for length, ends in self._ends.items():
            for end in range(max(known + 1, length), last + 1):
                ends[hash(tuple(token_ids[end - length : end]))] = end
        self._num_indexed = last


class NgramProposer:
    """Proposes continuations; what it keeps of a sequence lives and dies with the sequence.

    Args:
        shortest, longest: tokens that are compared, at least and at most.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return up to ``limit`` tokens with which the sequence may go on; none if its end is new."""
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(self._shortest, self._longest)
        return sequence.ngrams.continuation(sequence.token_ids, limit)
