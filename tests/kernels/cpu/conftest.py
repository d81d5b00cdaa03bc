"""What the tests of the C kernels share: they need a compiler, and leave the pool of threads as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import library, set_num_threads


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    set_num_threads(request.param)
    yield request.param
    set_num_threads(torch.get_num_threads())
