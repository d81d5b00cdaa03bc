"""The rows that each_pair chooses."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairs import covering_rows, each_pair


@pytest.mark.parametrize("sizes", [(2, 3), (7, 6, 2), (3, 4, 4, 2, 2)])
def test_every_pair_of_values_occurs_and_few_rows_do(sizes: tuple[int, ...]) -> None:
    rows = list(covering_rows(sizes))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    largest, second = sorted(sizes)[:-3:-1]
    assert len(rows) <= 1.3 * largest * second


@each_pair(number=[1, 2], name={"a": "first", "b": "second"}, items=[[1], [2]])
def test_ids_show_plain_values_and_keys(
    request: pytest.FixtureRequest, number: int, name: str, items: list[int]
) -> None:
    assert request.node.callspec.id == f"{number}-{'a' if name == 'first' else 'b'}-items{items[0] - 1}"
