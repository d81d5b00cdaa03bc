"""The implementations of the operations, each where it can run."""

from __future__ import annotations

import pytest

from kernels.cpu.library import library
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps


@pytest.fixture(params=["reference", "c", "triton"])
def ops(request: pytest.FixtureRequest) -> RecurrentOps:
    match request.param:
        case "c":
            if library() is None:
                pytest.skip("no C compiler is installed")
            from kernels.recurrent.c_ops import COps

            return COps()
        case "triton":
            request.getfixturevalue("kernel_device")
            from kernels.recurrent.triton.ops import TritonOps

            return TritonOps()
    return ReferenceOps()
