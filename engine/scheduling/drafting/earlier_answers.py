"""EarlierAnswers: the latest answers of an engine, in which the drafts of later ones are looked up.

Requests draft from the answers to requests with the same cache key only: as they share no cached blocks, no tenant
learns from the speed of an answer what another one was told.
"""

from __future__ import annotations

from array import array
from collections import deque

from engine.scheduling.drafting.suffix_index import SEPARATOR, SuffixIndex

__all__ = ["EarlierAnswers"]

MAX_TOKENS = 2**18  # of all answers: about 35 MB
MAX_ANSWER_TOKENS = 4096  # of one answer, its first ones: a few milliseconds at its end


class EarlierAnswers:
    """The latest answers, each after the end of its prompt; the oldest are forgotten first.

    Args:
        max_requests: answers that are kept, at most.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._indices: dict[str, SuffixIndex] = {}  # by cache key
        self._order: deque[tuple[str, int]] = deque()  # of each answer: its cache key, and its tokens
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def index(self, cache_key: str) -> SuffixIndex | None:
        """Return the index of the answers to requests with a cache key; None if there are none."""
        return self._indices.get(cache_key)

    def add(self, cache_key: str, token_ids: list[int]) -> None:
        """Keep the end of a prompt and its answer."""
        index = self._indices.setdefault(cache_key, SuffixIndex(array("i")))
        kept = [*token_ids[:MAX_ANSWER_TOKENS], SEPARATOR]
        index.text.extend(kept)
        index.extend(len(kept))
        self._order.append((cache_key, len(kept)))
        self._num_tokens += len(kept)
        while len(self._order) > self._max_requests or self._num_tokens > MAX_TOKENS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        cache_key, num_tokens = self._order.popleft()
        index = self._indices[cache_key]
        index.drop(num_tokens)
        self._num_tokens -= num_tokens
        if not index.text:
            del self._indices[cache_key]
