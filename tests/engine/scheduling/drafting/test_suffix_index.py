"""SuffixIndex finds what a plain search finds, however its text grew and shrank."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.drafting import suffix_index
from engine.scheduling.drafting.suffix_index import SEPARATOR, SHORTEST_MATCH, SuffixIndex

NUM_COMPARED = suffix_index._MOST_OCCURRENCES


def plain_search(text: list[int], last: list[int], longest: int, limit: int, share: float) -> tuple[int, list[int]]:
    """Return the length of the longest match of the end of ``last`` in a text, and the draft after it."""
    lengths: dict[int, int] = {}  # of the match that ends before each index, the latest index first
    for end in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(end, len(last), longest) and text[end - 1 - length] == last[-1 - length]:
            length += 1
        if length >= SHORTEST_MATCH:
            lengths[end] = length
    compared = dict(list(lengths.items())[:NUM_COMPARED])
    best = max(compared.values(), default=0)
    ends = [end for end, length in compared.items() if length == best]
    draft: list[int] = []
    agreeing = [list(text[end:]) for end in ends]  # what follows each, with the draft itself after the text's end
    while agreeing and len(draft) < limit:
        following = [rest[len(draft)] if len(draft) < len(rest) else draft[len(draft) - len(rest)] for rest in agreeing]
        token_id = max(following, key=lambda one: (following.count(one), -following.index(one)))
        if token_id == SEPARATOR or following.count(token_id) / len(ends) < share:
            break
        agreeing = [rest for rest, one in zip(agreeing, following, strict=True) if one == token_id]
        draft.append(token_id)
    return best, draft


def lookup(index: SuffixIndex, last: list[int], longest: int, limit: int, share: float) -> tuple[int, list[int]]:
    match = index.longest_match(last, longest)
    return (match.length, match.draft(limit, share)) if match else (0, [])


ANSWERS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8)


@given(
    parts=ANSWERS,
    longest=st.integers(3, 12),
    limit=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.1, 0.34, 0.6, 1.0]),
)
def test_a_growing_sequence_is_found_in_itself(parts: list[list[int]], longest: int, limit: int, share: float) -> None:
    token_ids: list[int] = []
    index = SuffixIndex(token_ids)
    for part in parts:
        token_ids += part
        index.extend(1000)
        expected = plain_search(token_ids, token_ids, longest, limit, share)
        assert lookup(index, token_ids, longest, limit, share) == expected


@given(
    answers=ANSWERS,
    last=st.lists(st.integers(0, 2), min_size=3, max_size=10),
    drops=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    longest=st.integers(3, 12),
    share=st.sampled_from([0.0, 0.34, 0.6, 1.0]),
)
def test_answers_that_come_and_go(
    answers: list[list[int]], last: list[int], drops: list[int], longest: int, share: float
) -> None:
    index, kept = SuffixIndex(array("i")), list[list[int]]()
    for answer, num_dropped in zip(answers, drops, strict=False):
        kept.append([*answer, SEPARATOR])
        index.text.extend(kept[-1])
        index.extend(1000)
        for _ in range(min(num_dropped, len(kept))):
            index.drop(len(kept.pop(0)))
        text = [token_id for part in kept for token_id in part]
        assert lookup(index, last, longest, 6, share) == plain_search(text, last, longest, 6, share)
    for part in kept:
        index.drop(len(part))
    assert (len(index.text), index._latest, len(index._previous)) == (0, {}, 0), "memory is left"


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 9, 8, 1, 2, 3], 1, [4]),  # twice 4, once 5
        (
            [7, 1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 7, 1, 2, 3],
            1,
            [4],
        ),  # a longer match goes before a frequent one
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3], 1, [5]),  # the latest of two
        ([4, 4, 4, 4, 4], 6, [4, 4, 4, 4, 4, 4]),  # it repeats itself
        ([1, 2, 3, 1, 2, 3], 5, [1, 2, 3, 1, 2]),
        ([1, 2, 3, 4, 2, 3], 5, []),  # two tokens are too few
        ([1, 2], 5, []),
    ],
)
def test_the_most_frequent_tokens_after_the_longest_match(text: list[int], limit: int, expected: list[int]) -> None:
    index = SuffixIndex(text)
    index.extend(1000)
    assert lookup(index, text, 24, limit, 0.1)[1] == expected


def test_a_long_text_is_indexed_over_several_steps() -> None:
    text = [1, 2, 3, 4, *range(10, 20), 1, 2, 3]
    index = SuffixIndex(text)
    index.extend(4)
    assert lookup(index, text, 24, 3, 0.0) == (3, [4, 10, 11]), "the draft reads on in what is not indexed yet"
    text += [5, 6, 7, 11, 12, 13]
    assert lookup(index, text, 24, 1, 0.0) == (0, [])
    index.extend(100)
    assert lookup(index, text, 24, 1, 0.0) == (3, [14])


def test_colliding_hashes_give_no_foreign_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "hash", lambda ngram: sum(ngram), raising=False)
    for last in ([3, 2, 1], [1, 2, 3]):
        index = SuffixIndex(array("i", [9, 1, 2, 3, 4, 9]))
        index.extend(100)
        assert lookup(index, last, 24, 1, 0.0) == ((3, [4]) if last == [1, 2, 3] else (0, []))
