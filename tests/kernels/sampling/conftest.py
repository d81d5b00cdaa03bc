"""The sampling kernels, where they can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from kernels.sampling.triton.ops import TritonSampling


@pytest.fixture
def ops(kernel_device: torch.device) -> TritonSampling:
    from kernels.sampling.triton.ops import TritonSampling

    return TritonSampling()


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)
