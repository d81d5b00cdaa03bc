"""Triton's launch path without a driver: kernels are specialised, and compiled if asked to, and their calls checked.

Triton binds and specialises the arguments itself, so the keys are those of a GPU: compile-time constants, dtypes,
integers that are 1 or multiples of 16, aligned pointers, options. Only the launch is replaced: the modules of contracts
check the arguments and compute the result.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.gpu_rehearsal import (
    chunk_contracts,
    coded_contracts,
    expert_contracts,
    kernel_contracts,
    latent_contracts,
    layer_contracts,
    recurrent_contracts,
    sampling_contracts,
)
from tests.gpu_rehearsal.code_lines import caller_line
from tests.gpu_rehearsal.device_tensor import DeviceTensor
from tests.gpu_rehearsal.kernel_contracts import ContractError, plain
from tests.gpu_rehearsal.machine import Machine

__all__ = ["Launches"]

HOPPER = 90
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # that CUDA launches, by dimension of the grid
CONTRACTS = {
    **kernel_contracts.CONTRACTS,
    **latent_contracts.CONTRACTS,
    **layer_contracts.CONTRACTS,
    **coded_contracts.CONTRACTS,
    **expert_contracts.CONTRACTS,
    **recurrent_contracts.CONTRACTS,
    **chunk_contracts.CONTRACTS,
    **sampling_contracts.CONTRACTS,
}
_NOT_COMPILED = object()  # takes the place of a variant's machine code
_FLOATS_ALONE = {  # whose results no contract checks
    *("prefill_kernel", "split_decode_kernel", "reduce_splits_kernel", "sparse_kernel"),
    *layer_contracts.CONTRACTS,
    *coded_contracts.CONTRACTS,
    *("grouped_linear_kernel", "grouped_coded_linear_kernel", "combine_kernel"),
    *recurrent_contracts.CONTRACTS,
    *chunk_contracts.CONTRACTS,
}
_RESULTS = ("output", "normed", "total", "split_output", "split_lse")  # arguments
OF_CONTEXTS = {*kernel_contracts.CONTRACTS, "index_scores_kernel"}  # which long contexts would make slow


@dataclass
class Launches:
    """The launches of a test.

    Attributes:
        machine: receives the errors.
        compiles: whether Triton compiles each variant, to machine code for sm_90; else only its key is noted.
        variants: each (kernel, key) that was launched, with the line of its first launch.
        counts: launches of each kernel.
        arguments: the integers that each kernel got, by "kernel.argument".
        computes: whether attention and cache writes compute their results; else they only check their arguments, and
            attention's output is zero.
        is_starting: an engine warms up or captures graphs, whose numbers are not read: floating-point results are
            zero. Contracts are checked.
        is_serving: the engine has said that it is ready: a variant that is new now is an error.
    """

    machine: Machine
    compiles: bool = False
    variants: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    arguments: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    computes: bool = True
    is_starting: bool = False
    is_serving: bool = False
    num_compiled: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace Triton's driver and launch until the test ends; every kernel begins uncompiled."""
        driver = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", HOPPER, 32),
            get_current_device=lambda: self.machine.current_device,
            get_current_stream=lambda device: 0,
            get_device_interface=lambda: torch.cuda,
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", self._before_compilation)
        run = JITFunction.run

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._launch(run, kernel, args, grid, options)

        monkeypatch.setattr(JITFunction, "run", launch)
        self.forget()

    def forget(self) -> None:
        """Forget everything, as a new process does."""
        # Imported with Triton's driver replaced.
        from kernels.attention.triton import decode, prefill  # noqa: F401

        for name, module in list(sys.modules.items()):
            for kernel in vars(module).values() if name.startswith("kernels.") else ():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()
        self.variants.clear()
        self.counts.clear()
        self.is_serving = False

    def _before_compilation(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook: it has no machine code for this key. True keeps it from compiling."""
        name = fn.name.rpartition(".")[2]
        if not self.compiles:  # what Triton then finds; without it, every launch would describe its variant again
            fn.jit_function.device_caches[compile["device"]][0][key] = _NOT_COMPILED
        if (name, key) not in self.variants:
            line = caller_line()
            self.variants[name, key] = line
            if self.is_serving:
                self.machine.faults.append(f"{name} is compiled while the engine serves, at {line}: {key}")
        self.num_compiled += self.compiles
        return not self.compiles

    def _computes(self, name: str) -> bool:
        """Whether a kernel computes its results now."""
        return (self.computes or name not in OF_CONTEXTS) and not (self.is_starting and name in _FLOATS_ALONE)

    def _zero(self, arguments: dict[str, Any]) -> None:
        """Write zeros where a kernel would write results: a step whose result is NaN ends its requests."""
        results = [plain(arguments[name]).zero_() for name in _RESULTS if arguments.get(name) is not None]
        if self.machine.captured is not None:
            self.machine.captured.results += results  # uninitialized again when a replay begins

    def _launch(
        self, run: Callable[..., Any], kernel: Any, args: Any, grid: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        name = kernel.fn.__name__
        if name not in CONTRACTS:
            raise ContractError(f"{name} has no contract; add one to tests/gpu_rehearsal/kernel_contracts.py")
        if any(size > most for size, most in zip(grid, MOST_PROGRAMS, strict=False)):
            raise ContractError(f"{name}: the grid {grid} exceeds {MOST_PROGRAMS}")
        self.counts[name] = self.counts.get(name, 0) + 1
        names = kernel.signature.parameters
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        index = self.machine.current_device
        for parameter, value in bound.items():
            if isinstance(value, int):
                self.arguments[f"{name}.{parameter}"].add(value)
            if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
                raise ValueError(f"Pointer argument {parameter} of {name} cannot be accessed from Triton (cpu tensor?)")
            if isinstance(value, DeviceTensor) and value.device.index != index:
                raise RuntimeError(f"{parameter} of {name} is on {value.device}, the current device is cuda:{index}")
        run(kernel, *args, grid=grid, warmup=True, **options)  # which also refuses arguments that do not fit
        self.machine.launch(index)
        line = None if self.machine.captured is None else caller_line()  # a replay runs elsewhere

        def compute() -> None:
            try:
                with _disable_current_modes():
                    result = CONTRACTS[name](SimpleNamespace(**bound), grid)
                    if self._computes(name):
                        result()
                    else:
                        self._zero(bound)
            except ContractError as error:
                raise ContractError(f"{name}: {error}, launched at {line or caller_line()}") from error

        compute()
        if self.machine.captured is not None:
            self.machine.captured.launches.append(compute)
