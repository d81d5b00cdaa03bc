"""Where the Triton kernels run: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import sys

import pytest
import torch

_HAS_GPU = torch.cuda.is_available()
# Triton decides when it is imported, and when a kernel is defined, whether kernels are interpreted. Other packages'
# tests may have imported it already (transformers does); then the kernels need a process of their own.
_TRITON_IS_COMPILED = not _HAS_GPU and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if not _HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns, which is an error here, when it is unset


torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other


@pytest.fixture(scope="session")
def kernels_need_own_process() -> bool:
    return _TRITON_IS_COMPILED


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Return the device whose tensors a Triton kernel can be called with."""
    pytest.importorskip("triton")
    if _TRITON_IS_COMPILED:
        pytest.skip("Triton was imported without its interpreter; test_triton_processes.py runs this test")
    return torch.device("cuda" if _HAS_GPU else "cpu")
