"""Compile, without a GPU, every kernel that an engine's warm-up compiles.

    python -m tests.kernels.compile_for_gpu 90 models Qwen3-0.6B 8B
    python -m tests.kernels.compile_for_gpu 80,90,100 variants attention sparse layers linear recurrent
    python -m tests.kernels.compile_for_gpu 80,90,100 variants all attention
    python -m tests.kernels.compile_for_gpu 90 variants few layers
    python -m tests.kernels.compile_for_gpu 80 sampling 151936 50257

The arguments are compute capabilities, and either ``models`` and models of HEADS, or ``variants`` and kernels of
gpu_variants.py, with ``all`` every combination of their dimensions and with ``few`` each value of them, or
``experts``: those of the mixtures of EXPERTS, with ``few`` every second one, or ``sampling``: the kernels that choose
tokens from vocabularies of these sizes. The interpreter accepts what the compiler refuses. Here the backend runs as
always, on a driver that claims to be a GPU, and each launch stops when its machine code is there.
Prints a line for each variant: the compute capability, the kernel's name, and how many registers of a thread, bytes of
a thread's stack (which are spilled registers), and bytes of shared memory it takes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any, Literal, cast

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from kernels.attention.triton import backend as triton_backend
from kernels.cache.triton.pages import copy_pages_triton
from kernels.cache.triton.pending_tokens import take_pending_tokens_triton
from kernels.experts.triton.experts import experts_triton
from kernels.sampling.triton.ops import TritonSampling
from tests.kernels.gpu_variants import VARIANTS, covering, each_value, every, run_attention
from tests.kernels.launch_log import KERNELS

HEADS = {"Qwen3-0.6B": (16, 8), "8B": (32, 8)}  # of queries, of keys and values
EXPERTS = [  # mixtures: experts and those of a token, inputs and outputs; some are no multiples of 16
    (128, 8, 256, 128, torch.bfloat16),
    (512, 10, 256, 128, torch.bfloat16),
    (60, 4, 256, 176, torch.float16),
    (8, 2, 256, 192, torch.float32),
    (5, 3, 104, 36, torch.bfloat16),
    (5, 3, 100, 36, torch.float32),
]
HEAD_DIM = 128
MULTIPROCESSORS = 132


class _Driver:
    """The driver methods that Triton calls before a launch, as of a GPU whose index is its compute capability.

    Triton keeps what it compiled by the index.
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def _stop_before_launch(kernel: Any, compiled: set[str]) -> None:
    run = kernel.run

    def compile_only(*arguments: Any, warmup: bool, **options: Any) -> None:
        variant = run(*arguments, warmup=True, **options)
        if variant.hash not in compiled:
            compiled.add(variant.hash)
            registers, stack = _registers_and_stack(variant.asm["cubin"])
            print(variant.metadata.target.arch, kernel.__name__, registers, stack, variant.metadata.shared)

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


def _run_experts(step: int) -> None:
    """Launch what layers with experts launch for few tokens and for many."""
    for num_experts, top_k, hidden_size, inner, dtype in EXPERTS[::step]:
        gate_up = torch.zeros(num_experts, 2 * inner, hidden_size, dtype=dtype)
        down = torch.zeros(num_experts, hidden_size, inner, dtype=dtype)
        for num_tokens in (1, 100):
            hidden = torch.zeros(num_tokens, hidden_size, dtype=dtype)
            logits = torch.zeros(num_tokens, num_experts, dtype=dtype)
            for scales_inputs in (False, True):
                experts_triton(hidden, logits, gate_up, down, top_k, normalize=True, scales_inputs=scales_inputs)


def _run_models(models: list[str]) -> None:
    for state_slots in (None, torch.zeros(300, dtype=torch.int32)):
        take_pending_tokens_triton(*torch.zeros(2, 300, dtype=torch.int64), state_slots)
    for to_staging in (True, False):
        pages = torch.zeros(3, 3, 4096, dtype=torch.int64)
        copy_pages_triton(pages, torch.zeros(2, dtype=torch.int64), pages, to_staging=to_staging)
    for model in models:
        num_heads, num_kv_heads = HEADS[model]
        shape = {"dtype": torch.bfloat16, "head_dim": HEAD_DIM, "group_size": num_heads // num_kv_heads}
        run_attention(**shape, num_kv_heads=num_kv_heads, window=None)
        # Few: a window changes few lines.
        run_attention(**shape, num_kv_heads=num_kv_heads, window=600, max_query_len=1, max_seq_len=600)


def _run_variants(names: list[str], capabilities: list[int]) -> None:
    """Launch a covering part of some kernels' variants, or all of them."""
    rows_of = every if "all" in names else each_value if "few" in names else covering
    for name in names:
        if name not in ("all", "few"):
            variants = VARIANTS[name]
            for row in rows_of({"capability": tuple(capabilities), **variants.dimensions}):
                triton.runtime.driver.set_active(_Driver(row.pop("capability")))
                variants.launch(**row)


def _run_sampling(vocab_sizes: list[int]) -> None:
    for vocab_size in vocab_sizes:
        TritonSampling().warm_up(torch.zeros(2, vocab_size))


def main(capabilities: list[int], what: Literal["models", "variants", "experts", "sampling"], names: list[str]) -> None:
    compiled: set[str] = set()
    for kernel in KERNELS:
        _stop_before_launch(kernel, compiled)
    triton_backend._num_multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
    if what == "variants":
        _run_variants(names, capabilities)
        return
    for capability in capabilities:
        triton.runtime.driver.set_active(_Driver(capability))
        match what:
            case "models":
                _run_models(names)
            case "experts":
                _run_experts(2 if "few" in names else 1)
            case "sampling":
                _run_sampling(list(map(int, names)))


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1].split(",")], cast(Any, sys.argv[2]), sys.argv[3:])
