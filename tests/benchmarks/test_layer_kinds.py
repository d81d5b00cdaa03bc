"""The capacity figures: what fits where layers cache different things, beside what arithmetic allows."""

from __future__ import annotations

import pytest

from benchmarks.kv_memory.layer_kinds import CONTEXTS, SHAPES, measure


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_most_tokens_that_arithmetic_allows_fit(shape: str, context: int) -> None:
    capacity = measure(shape, context, num_snapshots=0)
    assert 0.95 <= capacity.share <= 1.0
    assert capacity.tokens >= 0.98 * capacity.all_layers_kept
