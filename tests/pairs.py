"""each_pair: parametrizes a test with few of its parameters' combinations, in which every pair of values occurs.

Most bugs need at most two values to meet; all combinations would repeat each pair many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

Row = tuple[int, ...]  # an index into the values of each parameter
PLAIN = (str, int, float, bool, torch.dtype, type(None))


def each_pair(*, indirect: Sequence[str] = (), **values: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Return a parametrize mark whose rows contain every pair of values of two parameters.

    Args:
        indirect: parameters that are fixtures.
        values: of each parameter; a mapping's keys name its values in the tests' ids.
    """
    axes = {name: _labelled(name, choices) for name, choices in values.items()}
    rows = [
        [axis[index] for axis, index in zip(axes.values(), row, strict=True)]
        for row in covering_rows([len(axis) for axis in axes.values()])
    ]
    cases = [pytest.param(*(value for _, value in row), id="-".join(label for label, _ in row)) for row in rows]
    return pytest.mark.parametrize(tuple(axes), cases, indirect=list(indirect))


def _labelled(name: str, choices: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(choices, Mapping):
        return list(choices.items())
    return [
        (str(value).removeprefix("torch.") if isinstance(value, PLAIN) else f"{name}{index}", value)
        for index, value in enumerate(choices)
    ]


def covering_rows(sizes: Sequence[int]) -> Iterator[Row]:
    """Yield rows of indices until each pair of two columns has occurred, always the row with the most new pairs."""
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    while missing:
        row = max(product(*map(range, sizes)), key=lambda row: sum(pair in missing for pair in _pairs(row)))
        missing.difference_update(_pairs(row))
        yield row


def _pairs(row: Row) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return list(combinations(enumerate(row), 2))
