"""SuffixIndex: where the end of a sequence occurred in a text before, and what followed it most often.

It finds what a suffix tree finds, with the hash chains of LZ77 compressors (Deutsch, RFC 1951): a table maps the hash
of each n-gram to its latest occurrence, and each occurrence to the one before it.

    text      a  b  c  x  a  b  c  y  a  b  c      after which the sequence's end, ... a b c, is looked up:
    ends               3           7               7, then 3; what followed: y and x

The occurrences are compared with the tokens before the n-gram too. Those with the longest match count, and the draft
takes the token that most of them have next, then the token that most of these have next, and so on. This module knows
token ids only.
"""

from __future__ import annotations

from array import array
from collections import Counter

__all__ = ["SEPARATOR", "SHORTEST_MATCH", "Match", "SuffixIndex"]

SHORTEST_MATCH = 3  # tokens; shorter ones occur everywhere, and say little about what follows
_MOST_OCCURRENCES = 8  # the latest ones, which are compared in tens of microseconds
SEPARATOR = -1  # between two answers in one text. No token equals it, so no match goes beyond it, nor does a draft


class Match:
    """The occurrences of the longest match of a sequence's end in a text.

    Args:
        text: the text.
        length: tokens of the match.
        ends: indices after the occurrences, the latest first.
    """

    __slots__ = ("_ends", "_text", "length")

    def __init__(self, text: list[int] | array[int], length: int, ends: list[int]) -> None:
        self._text, self.length, self._ends = text, length, ends

    def draft(self, limit: int, least_probability: float) -> list[int]:
        """Return up to ``limit`` tokens that followed the match most often.

        The draft ends before the token with which it has followed less than this share of the occurrences. Where the
        text ends it is the match itself that continues, so the draft repeats what it has drafted.
        """
        text, ends, draft, num_occurrences = self._text, self._ends, list[int](), len(self._ends)
        while len(draft) < limit:
            following = [text[end] if end < len(text) else draft[end - len(text)] for end in ends]
            token_id, count = following[0], len(ends)
            if following.count(token_id) < count:
                token_id, count = Counter(following).most_common(1)[0]  # of equally frequent ones the latest
            if token_id == SEPARATOR or count < least_probability * num_occurrences:
                break
            draft.append(token_id)
            ends = [end + 1 for end, other in zip(ends, following, strict=True) if other == token_id]
        return draft


class SuffixIndex:
    """An index of a text that grows at its end and may lose its beginning; about 0.13 KB for each token.

    Args:
        text: the text, to which the caller adds tokens; the index must be told of them with ``extend``.
    """

    __slots__ = ("_first", "_latest", "_num_dropped", "_previous", "text")

    def __init__(self, text: list[int] | array[int]) -> None:
        self.text = text
        # Positions count from the first token ever added. An n-gram's position is that of the token after it.
        self._latest: dict[int, int] = {}  # hash of an n-gram -> its latest position; a comparison detects collisions
        self._previous = array("q")  # of each token of the text: the position before it of the same hash, or -1
        self._num_dropped = 0  # tokens that were removed from the text
        self._first = 0  # tokens at the start of the text that are to be removed

    def extend(self, limit: int) -> None:
        """Index the n-grams before the next tokens of the text, at most ``limit``; one takes half a microsecond."""
        latest, previous = self._latest, self._previous
        start = len(previous)
        stop = min(len(self.text), start + limit)
        if stop == start + 1 > SHORTEST_MATCH:  # quick: the step of a sequence
            key = hash(tuple(self.text[start - SHORTEST_MATCH : start]))
            previous.append(latest.get(key, -1))
            latest[key] = self._num_dropped + start
            return
        previous.extend([-1] * (min(stop, SHORTEST_MATCH) - start))
        first = max(start, SHORTEST_MATCH)
        tokens = self.text[first - SHORTEST_MATCH : max(first, stop) - 1]
        shifted = [tokens[index:] for index in range(SHORTEST_MATCH)]
        append, get = previous.append, latest.get
        for position, ngram in enumerate(zip(*shifted, strict=False), self._num_dropped + first):
            if SEPARATOR in ngram:  # when its first tokens are removed, it could not be found to be forgotten
                append(-1)
                continue
            key = hash(ngram)
            append(get(key, -1))
            latest[key] = position

    def drop(self, count: int) -> None:
        """Forget the first ``count`` tokens."""
        text, latest, offset = self.text, self._latest, self._num_dropped
        for index in range(self._first, self._first + count):
            if index >= SHORTEST_MATCH:
                key = hash(tuple(text[index - SHORTEST_MATCH : index]))
                if latest.get(key) == offset + index:
                    del latest[key]
        self._first += count
        if 2 * self._first >= len(text):  # rarely, since it moves the rest
            del text[: self._first], self._previous[: self._first]
            self._num_dropped += self._first
            self._first = 0

    def longest_match(self, token_ids: list[int], longest: int) -> Match | None:
        """Return the longest match of the end of a sequence, of up to ``longest`` tokens, in the text.

        None if its last tokens never occurred, or if ``longest`` is less than the shortest match.
        """
        position = self._latest.get(hash(tuple(token_ids[-SHORTEST_MATCH:])), -1)
        if position < 0:
            return None
        text, offset, first = self.text, self._num_dropped, self._first
        last: list[int] | array[int] = token_ids[-longest:]
        if isinstance(text, array):
            last = array("i", last)  # two arrays are compared at once
        best, ends = SHORTEST_MATCH - 1, list[int]()
        for _ in range(_MOST_OCCURRENCES):
            end = position - offset
            if end <= first:  # the rest of the chain is forgotten
                break
            length = _common_length(text, first, end, last)
            if length > best:
                best, ends = length, []
            if length == best:
                ends.append(end)
            position = self._previous[end]
        return Match(text, best, ends) if best >= SHORTEST_MATCH and ends else None


def _common_length(text: list[int] | array[int], first: int, end: int, last: list[int] | array[int]) -> int:
    """Return how many of the ``last`` tokens of a sequence, from the end, are those of the text before ``end``."""
    limit = min(len(last), end - first)
    if text[end - limit : end] == last[len(last) - limit :]:
        return limit
    for length in range(limit):
        if text[end - 1 - length] != last[-1 - length]:
            return length
    return limit
