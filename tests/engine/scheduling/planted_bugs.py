"""Plants a bug and drives random requests until the checks of the random load detect it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.engine.random_load import drive

__all__ = ["Plant", "assert_found"]

NUM_SEEDS = 40  # in which a planted bug must be found; about 10,000 steps

Plant = Callable[[pytest.MonkeyPatch], None]


@cache
def passes(seed: int, **options: Any) -> bool:
    """Whether the unchanged code passes a run; it raises if not."""
    return not drive(seed, **options).requests


def assert_found(plant: Plant, symptom: str, *, first_seed: int = 0, **options: Any) -> None:
    """Assert that sound code passes the runs until the one in which the planted bug shows this symptom.

    ``first_seed`` is tried first, so that a bug that few runs show is found sooner; then those after and before it.
    """
    for seed in (*range(first_seed, NUM_SEEDS), *range(first_seed)):
        passes(seed, **options)
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            try:
                drive(seed, **options)
            except Exception as error:
                seen = f"{type(error).__name__}: {error}"
                assert re.search(symptom, seen), f"seed {seed} shows another symptom: {seen}"
                return
    raise AssertionError(f"the planted bug was not found in {NUM_SEEDS} runs")
