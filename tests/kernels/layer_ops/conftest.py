"""The implementations of a layer's operations: by torch, and by Triton where its kernels can run."""

from __future__ import annotations

import pytest
import torch

from kernels.layer_ops.base import LayerOps
from kernels.layer_ops.torch import TorchOps


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> LayerOps:
    if request.param == "torch":
        return TorchOps()
    request.getfixturevalue("kernel_device")
    from kernels.layer_ops.triton.ops import TritonOps

    return TritonOps()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
