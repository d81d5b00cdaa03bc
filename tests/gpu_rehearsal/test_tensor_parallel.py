"""Mistakes of tensor-parallel ranks, on cuda:0 and cuda:1; test_steps.py has the steps that go well."""

from __future__ import annotations

import re

import pytest

from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal

GATHER = "engine.models.tensor_parallel:TensorParallel.gather_columns"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("columns = columns[:, self.rank :]", "the ranks call different collectives|must be contiguous"),
        ("columns = columns.half() if self.rank else columns", "the ranks call different collectives"),
        ("columns = columns.to('cuda:0')", "rank 1 of NCCL got a tensor on cuda:0"),
        ("columns = columns[:, ::2]", "must be contiguous"),
    ],
)
def test_a_wrong_collective(fault: str, problem: str, gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    line = plant(monkeypatch, GATHER, '"""Return the ranks', fault)
    with pytest.raises((RuntimeError, ValueError), match=f"({problem})(.|\n)* at {re.escape(line.split(':')[0])}"):
        gpu.start(tensor_parallel_size=2)  # its warm-up calls the collectives
