"""Compile, without a GPU, every kernel that an engine's warm-up compiles.

    python -m tests.kernels.compile_for_gpu 90 attention Qwen3-0.6B 8B
    python -m tests.kernels.compile_for_gpu 100 layers

The arguments are a compute capability, and either ``attention`` and models of HEADS, or ``layers``: the kernels of all
models of layer_ops_launches.py, and those that sample. The interpreter accepts what the compiler refuses. Here the
backend runs as always, on a driver that claims to be a GPU, and each launch stops when its machine code is there.
Prints a line for each variant: the kernel's name, and how many registers of a thread, bytes of a thread's stack (which
are spilled registers), and bytes of shared memory it takes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from engine.worker.warm_up import one_sequence
from kernels.attention import triton_backend, triton_kernels
from kernels.attention.base import AttentionInputs, StepLimits
from kernels.attention.triton_backend import TritonBackend
from kernels.experts_triton import _grouped_linear_kernel, experts_triton
from kernels.layer_ops import triton_kernels as layer_kernels
from kernels.store_kvcache_triton import _store_kernel, store_kvcache_triton
from tests.kernels.layer_ops_launches import MODELS, run_layer_ops

CPU = torch.device("cpu")
HEADS = {"Qwen3-0.6B": (16, 8), "8B": (32, 8)}  # of queries, of keys and values
HEAD_DIM, BLOCK_SIZE = 128, 16
MULTIPROCESSORS = 132


class _Driver:
    """The driver methods that Triton calls before a launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _stop_before_launch(kernel: Any, compiled: set[str]) -> None:
    run = kernel.run

    def compile_only(*arguments: Any, warmup: bool, **options: Any) -> None:
        variant = run(*arguments, warmup=True, **options)
        if variant.hash not in compiled:
            compiled.add(variant.hash)
            print(kernel.__name__, *_registers_and_stack(variant.asm["cubin"]), variant.metadata.shared)

    kernel.run = compile_only


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return int(registers), int(stack)


def _run_warm_up(
    num_heads: int, num_kv_heads: int, window: int | None, *, max_query_len: int, max_seq_len: int
) -> None:
    """Launch what a warm-up launches in one layer."""
    backend, dtype = TritonBackend(), torch.bfloat16
    limits = StepLimits(num_heads, num_kv_heads, HEAD_DIM, dtype, CPU, frozenset([window]), max_query_len, max_seq_len)
    cache = torch.zeros(1, BLOCK_SIZE, num_kv_heads, HEAD_DIM, dtype=dtype)
    for query_len, seq_len in backend.warm_up_batches(limits):
        metadata = one_sequence(query_len, seq_len, block_size=BLOCK_SIZE, device=CPU).metadata
        query = torch.zeros(query_len, num_heads, HEAD_DIM, dtype=dtype)
        backend.forward(AttentionInputs(query, cache, cache, metadata, HEAD_DIM**-0.5, window))
        key = query[:, :num_kv_heads]
        store_kvcache_triton(key, key, cache, cache, metadata.slot_mapping)


def _run_experts(num_experts: int = 8, top_k: int = 2, hidden_size: int = 64) -> None:
    """Launch what a layer with experts launches for few tokens and for many."""
    gate_up = torch.zeros(num_experts, 2 * hidden_size, hidden_size, dtype=torch.bfloat16)
    for num_tokens in (1, 1000):
        ids = torch.zeros(num_tokens, top_k, dtype=torch.int64)
        hidden = torch.zeros(num_tokens, hidden_size, dtype=torch.bfloat16)
        experts_triton(hidden, gate_up, gate_up[:, :hidden_size].contiguous(), ids.float(), ids)


def _run_attention(models: list[str]) -> None:
    triton_backend._num_multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
    for model in models:
        _run_warm_up(*HEADS[model], None, max_query_len=2048, max_seq_len=40960)
        _run_experts()
        _run_warm_up(*HEADS[model], 600, max_query_len=1, max_seq_len=600)  # few: a window changes few lines


def _run_layers() -> None:
    for shape in MODELS.values():
        run_layer_ops(shape)


def main(capability: int, what: str, models: list[str]) -> None:
    triton.runtime.driver.set_active(_Driver(capability))
    compiled: set[str] = set()
    for module in (triton_kernels, layer_kernels):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                _stop_before_launch(kernel, compiled)
    for kernel in (_store_kernel, _grouped_linear_kernel):
        _stop_before_launch(kernel, compiled)
    if what == "attention":
        _run_attention(models)
    else:
        _run_layers()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
