"""The implementations of the operations, each where it can run."""

from __future__ import annotations

import pytest

from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps


@pytest.fixture(params=["reference"])
def ops(request: pytest.FixtureRequest) -> RecurrentOps:
    return ReferenceOps()
