"""A simulated machine leaves nothing in the process that changes what a later test of the CPU computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils import _device

from tests.gpu_rehearsal.rehearsal import simulated

CONSTRUCTORS: list[Callable[..., torch.Tensor]] = [torch.tensor, torch.as_tensor, torch.asarray, torch.zeros]


@pytest.fixture(autouse=True)
def unlisted_constructors() -> Iterator[None]:
    """Let torch list the functions that make tensors again, as at its first use of a device context in a process."""
    _device._device_constructors.cache_clear()
    yield
    _device._device_constructors.cache_clear()


def test_a_device_context_applies_to_every_constructor_again() -> None:
    with pytest.MonkeyPatch.context() as patch, simulated(patch), torch.device("meta"):
        torch.zeros(1)
    with torch.device("meta"):
        assert [make([1]).device.type for make in CONSTRUCTORS] == ["meta"] * len(CONSTRUCTORS)
