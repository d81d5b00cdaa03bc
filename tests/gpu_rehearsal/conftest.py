"""Only `make test-gpu-rehearsal` collects these tests: they need torch's CUDA build on a machine without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

_IS_REHEARSAL = (
    os.environ.get("PAGODA_GPU_REHEARSAL") == "1" and torch.version.cuda is not None and not torch.cuda.is_available()
)
collect_ignore_glob = [] if _IS_REHEARSAL else ["test_*.py"]

if _IS_REHEARSAL:
    # What a graph pads a step with may be NaN. With AMX, oneDNN's products in bfloat16 of rows whose length is no
    # multiple of 32 spread that to other rows (torch 2.13), which no GPU does. It reads this before its first product.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

    from tests.gpu_rehearsal.family_models import SCENARIO, Models
    from tests.gpu_rehearsal.rehearsal import Rehearsal, simulated
    from tests.gpu_rehearsal.scenarios import SCENARIOS

    torch.set_num_threads(1)

    @pytest.fixture(scope="session")
    def cpu_answers() -> dict[str, object]:
        """What the CPU answers to each scenario. Request it before `gpu`: it must not see the simulated GPU."""
        from engine.llm import LLM
        from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS, answers, generate

        by_scenario: dict[str, object] = {}
        for name, scenario in SCENARIOS.items():
            if name == "flash_attn":  # it is compared with Triton
                continue
            options = {**OPTIONS, **scenario.options, "device": "cpu", "tensor_parallel_size": 1}
            llm = LLM(DEMO_MODEL, **options)
            by_scenario[name] = answers(generate(llm, scenario))
        return by_scenario

    @pytest.fixture
    def gpu_with_flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
        """The same with flash-attn."""
        with simulated(monkeypatch, has_flash_attn=True) as rehearsal:
            yield rehearsal
            rehearsal.machine.check()

    @pytest.fixture
    def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
        """A machine with two GPUs and Triton, without flash-attn."""
        with simulated(monkeypatch) as rehearsal:
            yield rehearsal
            rehearsal.machine.check()  # for tests that forget it

    # The CPU's answers are made before a test simulates the GPU.
    @pytest.fixture
    def case(request: pytest.FixtureRequest, models: Models) -> tuple[str, Any]:
        """The path of the named one of a module's models, and the CPU's answers."""
        path = models.path(request.param)
        return path, models.expected(path, SCENARIO)
