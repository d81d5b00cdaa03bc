"""NgramIndex finds what a plain search finds, however the sequence grew; NgramProposer keeps one for each sequence."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.drafting import ngram_proposer
from engine.scheduling.drafting.ngram_proposer import NgramIndex, NgramProposer
from engine.sequence import Sequence, SequenceGroup


def plain_search(token_ids: list[int], shortest: int, longest: int, limit: int) -> list[int]:
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == token_ids[-length:]:
                end = start + length
                copied = list(token_ids)
                for index in range(end, end + limit):
                    if index >= len(token_ids) and end + length < len(token_ids):
                        break  # it copies from what it has copied only if the two occurrences touch
                    copied.append(copied[index])
                return copied[len(token_ids) :]
    return []


def make_sequence(token_ids: list[int]) -> Sequence:
    group = SequenceGroup(
        EngineRequest("a", token_ids, SamplingParams(temperature=0)),
        arrival=0,
        root=0,
        stop_token_ids=frozenset(),
        max_total_tokens=1000,
        seed=0,
    )
    return group.sequences[0]


@pytest.mark.parametrize(
    ("token_ids", "limit", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3]),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # the latest
        ([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], 1, [7]),  # the longest goes before the latest
        ([4, 4, 4, 4], 5, [4, 4, 4, 4, 4]),  # what overlaps goes on
        ([9, 1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),
        ([9, 1, 2, 1, 2, 1], 1, [2]),
        ([1, 2, 3, 4, 1, 2, 3, 4], 7, [1, 2, 3, 4, 1, 2, 3]),  # so does what touches
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 7, [5, 1, 2, 3, 4]),
        ([1, 2, 3, 4, 5, 2, 3], 5, []),  # two tokens are too few
        ([1, 2, 3], 5, []),
        ([1], 5, []),
    ],
)
def test_what_followed_the_last_tokens_is_proposed(token_ids: list[int], limit: int, expected: list[int]) -> None:
    assert NgramProposer(3, 4).propose(make_sequence(token_ids), limit) == expected


@given(
    parts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    limit=st.integers(1, 8),
)
def test_a_growing_index_finds_what_a_plain_search_finds(
    parts: list[list[int]], lengths: list[int], limit: int
) -> None:
    index, token_ids = NgramIndex(*lengths), list[int]()
    for part in parts:
        token_ids += part
        assert index.continuation(token_ids, limit) == plain_search(token_ids, *lengths, limit)


def test_a_long_prompt_is_taken_in_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_proposer, "MAX_TOKENS_AT_ONCE", 10)
    index = NgramIndex(2, 3)
    token_ids = [1, 2, 3, *range(10, 20), 1, 2, 4, *range(20, 25), 1, 2]
    assert index.continuation(token_ids, 1) == [3]  # found in the first ten
    assert index.continuation([*token_ids, 1, 2], 1) == [4]
    assert index.continuation([*token_ids, 1, 2, 1, 2], 1) == [1]


def test_colliding_hashes_give_no_foreign_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_proposer, "hash", lambda ngram: sum(ngram), raising=False)
    index = NgramIndex(2, 3)
    assert index.continuation([1, 2, 9, 2, 1], 3) == []
    assert index.continuation([1, 2, 9, 2, 1, 7, 1, 2], 3) == []  # a later n-gram has the same hash
    assert index.continuation([1, 2, 9, 2, 1, 7, 1, 2, 9, 2], 3) == [1, 7, 1]


def test_an_index_is_freed_with_its_sequence_and_not_shared_with_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    indexes: list[weakref.ref[NgramIndex]] = []

    class WatchedIndex(NgramIndex):
        __slots__ = ("__weakref__",)

        def __init__(self, shortest: int, longest: int) -> None:
            super().__init__(shortest, longest)
            indexes.append(weakref.ref(self))

    monkeypatch.setattr(ngram_proposer, "NgramIndex", WatchedIndex)
    proposer, sequence = NgramProposer(1, 2), make_sequence([1, 2, 1])
    assert proposer.propose(sequence, 1) == [2]
    assert proposer.propose(sequence, 1) == [2]
    assert len(indexes) == 1, "the sequence has one index"
    fork = sequence.fork(1, 0)
    assert proposer.propose(fork, 1) == [2]
    assert len(indexes) == 2, "the fork has its own index"
    del sequence, fork
    gc.collect()
    assert [index() for index in indexes] == [None, None]
