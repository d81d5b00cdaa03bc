"""Rehearsal: the simulated machine of one test, and engines on it whose every step is checked."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as distributed

from engine.engine import Engine
from engine.llm import LLM
from tests.gpu_rehearsal import cuda_stubs, flash_attn_stub, ranks
from tests.gpu_rehearsal.device_tensor import SimulatedGpu
from tests.gpu_rehearsal.launches import Launches
from tests.gpu_rehearsal.machine import Machine
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS

__all__ = ["Rehearsal", "simulated"]

LARGEST_CHUNKS = 2048  # tokens


class Rehearsal:
    """A simulated machine with two H200.

    Attributes:
        machine: what a step did wrong.
        launches: of Triton kernels.
    """

    def __init__(self, machine: Machine, launches: Launches) -> None:
        self.machine = machine
        self.launches = launches

    def start(self, model: str = DEMO_MODEL, **options: Any) -> LLM:
        """Load a model on ``cuda:0``; loading and warming up may wait. From then on every step is checked.

        Steps do not overlap unless ``options`` say so: a call of ``Runner.run`` is one of them.
        """
        self.launches.is_serving, self.launches.is_starting = False, True
        try:
            llm = LLM(model, **{**OPTIONS, "device": "cuda", "async_scheduling": False, **options})
        finally:
            self.launches.is_starting = False
        self.launches.is_serving = True
        return llm


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, *, has_flash_attn: bool = False) -> Iterator[Rehearsal]:
    """Simulate the GPUs until the context ends."""
    machine = Machine()
    launches = Launches(machine)
    cuda_stubs.install(machine, monkeypatch)
    launches.install(monkeypatch)
    for name in flash_attn_stub.MODULES:
        module = flash_attn_stub.make_module(machine, name) if has_flash_attn else None
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", ranks.make_process_group(machine))
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ranks.ThreadRanks)
    _capture_fewer_graphs(monkeypatch)
    for module in [module for name, module in sys.modules.items() if name.startswith("engine.")]:
        if getattr(module, "perf_counter", None) is time.perf_counter:
            monkeypatch.setattr(module, "perf_counter", machine.clock.perf_counter)
    monkeypatch.setattr(Engine, "step", _checked(machine, Engine.step))
    with SimulatedGpu(machine):
        yield Rehearsal(machine, launches)


def _capture_fewer_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs of chunks have two sizes of each kind; capturing them takes most of an engine's start."""
    monkeypatch.setattr("engine.worker.graphs.batch_shape._CHUNK_SIZES", (32, LARGEST_CHUNKS))
    monkeypatch.setattr("engine.worker.graphs.batch_graphs.mixed_decode_sizes", lambda max_num_seqs: [0, max_num_seqs])


def _checked(machine: Machine, step: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
    def checked_step(engine: Engine) -> Any:
        gc.disable()  # collecting an earlier engine waits for its copies, and this step does not
        try:
            with machine.step():
                return step(engine)
        finally:
            gc.enable()

    return checked_step


assert torch.version.cuda is not None, "the rehearsal needs torch's CUDA build: make test-gpu-rehearsal"
