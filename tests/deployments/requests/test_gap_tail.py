"""The percentile that is followed, beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.requests.gap_tail import GapTail


@pytest.mark.parametrize("scale", [1e-3, 0.1])
@pytest.mark.parametrize("name", ["exponential", "lognormal", "two lengths"])
def test_it_follows_the_percentile(name: str, scale: float) -> None:
    source = np.random.default_rng(0)
    gaps = {
        "exponential": source.exponential(size=60_000),
        "lognormal": source.lognormal(0, 0.5, size=60_000),
        "two lengths": np.where(source.random(60_000) < 0.03, 5.0, 1.0) * source.lognormal(0, 0.1, size=60_000),
    }[name]
    tail = GapTail()
    seen = []
    for gap in scale * gaps:
        tail.add(float(gap))
        seen.append(tail.seconds)
    assert seen[100] == 0.0  # not known yet
    expected = float(np.percentile(scale * gaps, 99))
    assert np.mean(seen[30_000:]) == pytest.approx(expected, rel=0.15)
    assert min(seen[30_000:]) > 0.6 * expected


def test_a_single_pause_changes_nothing() -> None:
    tail = GapTail()
    for _ in range(1000):
        tail.add(0.01)
    before = tail.seconds
    tail.add(60.0)
    assert tail.seconds < 1.04 * before
