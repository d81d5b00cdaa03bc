"""Two tensor-parallel ranks, on cuda:0 and cuda:1."""

from __future__ import annotations

import re

import pytest

from engine.sampling_params import SamplingParams
from tests.gpu_rehearsal.planting import plant
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import SCENARIOS, answers, generate

GATHER = "engine.models.tensor_parallel:TensorParallel.gather_columns"


@pytest.mark.parametrize("name", ["every parameter", "swapped"])
def test_a_scenario(name: str, cpu_answers: dict[str, object], gpu: Rehearsal) -> None:
    scenario = SCENARIOS[name]
    llm = gpu.start(tensor_parallel_size=2, **scenario.options)
    outputs = generate(llm, scenario)
    gpu.machine.check()
    assert answers(outputs) == cpu_answers[name]


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
    llm = gpu.start(tensor_parallel_size=2)
    with pytest.raises((RuntimeError, ValueError), match=f"({problem})(.|\n)* at {re.escape(line.split(':')[0])}"):
        llm.generate([{"prompt_token_ids": [20, 30]}], SamplingParams(max_tokens=2), use_tqdm=False)
