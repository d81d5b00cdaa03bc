"""PrefixMarks: a slot counts as computed for the texts that begin with the tokens which it was computed after."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.page_copies import PageCopies
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceGroup
from engine.worker.drafting.prefix_marks import HostPrefixMarks, PrefixMarks

BLOCK_SIZE = 4
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def make_sequence(token_ids: list[int], table: list[int]) -> Sequence:
    request = EngineRequest("a", token_ids, SamplingParams())
    group = SequenceGroup(request, arrival=0, root=0, stop_token_ids=frozenset(), max_total_tokens=9999, seed=0)
    group.sequences[0].block_table = table
    return group.sequences[0]


def make_marks(dtype: torch.dtype = torch.bfloat16, num_blocks: int = 40, *, include_next: bool = False) -> PrefixMarks:
    part = torch.zeros(num_blocks, BLOCK_SIZE, 8 // dtype.itemsize, dtype=dtype)
    return PrefixMarks(part, include_next=include_next)


def slots(table: list[int], first: int, end: int) -> np.ndarray:
    return np.array([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, end)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_marks_take_eight_bytes_of_any_dtype(dtype: torch.dtype) -> None:
    marks, table = make_marks(dtype), [3, 1]
    sequence = make_sequence([5, 6, 7, 8, 9], table)
    assert marks.num_computed(sequence) == 0
    marks.write(sequence, 0, [], slots(table, 0, 5))
    assert marks.num_computed(sequence) == 5


@given(own=TOKENS, other=TOKENS, count=st.integers(1, 30))
def test_exactly_the_common_prefix_counts(own: list[int], other: list[int], count: int) -> None:
    """Of two texts in the same blocks, that of the first which was computed; never an equal token after another one."""
    marks, table = make_marks(), list(range(8))
    count = min(count, len(own))
    marks.write(make_sequence(own, table), 0, [], slots(table, 0, count))
    expected = next((i for i, (a, b) in enumerate(zip(own[:count], other, strict=False)) if a != b), None)
    expected = min(count, len(other)) if expected is None else expected
    assert marks.num_computed(make_sequence(other, table)) == expected


@given(own=TOKENS, other=TOKENS, count=st.integers(0, 30))
def test_the_next_token_counts_too_but_not_after_a_block(own: list[int], other: list[int], count: int) -> None:
    """Of layers that read the next token as well: what ends a block serves texts that go on otherwise after it."""
    marks, table = make_marks(include_next=True), list(range(8))
    if count := min(count, len(own) - 1):
        marks.write(make_sequence(own, table), 0, [], slots(table, 0, count))
    expected = 0
    for index in range(min(count, len(other) - 1)):
        is_known = own[: index + 2] == other[: index + 2] or (index + 1) % BLOCK_SIZE == 0
        if own[: index + 1] != other[: index + 1] or not is_known:
            break
        expected += 1
    assert marks.num_computed(make_sequence(other, table)) == expected


def test_what_is_not_computed_after_a_block_does_not_count() -> None:
    marks, table, tokens = make_marks(include_next=True), [2, 3, 4], list(range(11))
    sequence = make_sequence(tokens, table)
    marks.write(sequence, 0, [], slots(table, 0, 10))
    assert marks.num_computed(make_sequence(tokens, [2, 3, 4])) == 10
    marks.forget(slots(table, 7, 8))
    assert marks.num_computed(make_sequence(tokens, [2, 3, 4])) == 7
    assert marks.num_computed(make_sequence([9, *tokens[1:]], [2, 3, 4])) == 0


def test_a_text_that_grows_keeps_its_marks() -> None:
    """In steps of any size, past the first sizes of the tables, and with a draft that becomes a part of it or not."""
    rng, marks, table = random.Random(1), make_marks(num_blocks=400), list(range(399, -1, -1))
    sequence, computed = make_sequence([1, 2, 3], table), 0
    while len(sequence.token_ids) < 1200:
        end = len(sequence.token_ids)
        draft = [rng.randrange(9) for _ in range(rng.randrange(5))]
        marks.write(sequence, computed, draft, slots(table, computed, end + len(draft)))
        assert marks.num_computed(sequence) == end
        accepted = rng.randint(0, len(draft))
        sequence.token_ids += draft[:accepted]
        computed = end + accepted
        assert marks.num_computed(sequence) == computed
        sequence.token_ids += [9] * rng.randint(1, 99)
        assert marks.num_computed(sequence) == computed


def test_only_the_blocks_of_the_table_count() -> None:
    marks = make_marks()
    sequence = make_sequence(list(range(10)), [0, 1, 2])
    marks.write(sequence, 0, [], slots([0, 1, 2], 0, 10))
    sequence.block_table = [0, 1]
    assert marks.num_computed(sequence) == 8
    sequence.block_table = [0, 3, 2]
    assert marks.num_computed(sequence) == 4


def test_marks_on_the_host_follow_the_copies_of_a_step() -> None:
    """Out of the device before into it, and those on the device as if all at the same time."""
    tokens = list(range(5, 5 + 2 * BLOCK_SIZE))
    marks = HostPrefixMarks(6, 3, BLOCK_SIZE)

    def num_computed(table: list[int]) -> int:
        return marks.num_computed(make_sequence(tokens, table))

    marks.write(make_sequence(tokens, [0, 1]), 0, [], slots([0, 1], 0, len(tokens)))
    marks.follow(PageCopies(on_device=[(0, 1), (1, 0)]))
    assert (num_computed([1, 0]), num_computed([0, 1])) == (8, 0)
    marks.follow(PageCopies(swap_out=[(1, 2), (0, 0)], swap_in=[(2, 0), (0, 5)]))
    assert (num_computed([0, 5]), num_computed([1, 0])) == (8, 4)
    marks.follow(PageCopies(swap_in=[(1, 5)]))  # a page that came without marks
    assert num_computed([0, 5]) == 4
