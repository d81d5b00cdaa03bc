"""Tests in a Python process of their own: Triton decides once a process whether it interprets or compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a program, by compute capability
KNOWN_STACK = {(80, "mixed_kernel"): 40}  # bytes: tiles of 64 rows spill there, and not on sm_90


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_nothing_on_the_cpu_path_imports_triton_or_flash_attn() -> None:
    script = (
        "import sys, torch, kernels, kernels.reference; from kernels.attention.select import select_backend; "
        "import kernels.attention.flash_attn_backend, kernels.attention.reference; "
        "select_backend(torch.device('cpu'), torch.float32); "
        "print([name for name in ('triton', 'flash_attn') if name in sys.modules])"
    )
    result = _python("-c", script)
    assert result.stdout.strip() == "[]", result.stderr


def _compile(cache: Path, *arguments: str) -> Counter[str]:
    """Compile for a GPU in another process, check what each variant takes, and return the kernels' variants."""
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    result = _python("-m", "tests.kernels.compile_for_gpu", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    variants = [line.split() for line in result.stdout.splitlines()]
    for line, (name, registers, stack, shared) in zip(result.stdout.splitlines(), variants, strict=True):
        assert 0 < int(registers) <= 255, line
        assert int(stack) <= KNOWN_STACK.get((int(arguments[0]), name), 0), f"registers are spilled: {line}"
        assert int(shared) <= SHARED_MEMORY[int(arguments[0])], line
    return Counter(name for name, *_ in variants)


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_of_a_decoder_layer_compiles_for_gpus(capability: int, tmp_path: Path) -> None:
    compiled = _compile(tmp_path, str(capability), "layers")
    assert set(compiled) == {"add_norm_kernel", "rotate_and_store_kernel", "gated_activation_kernel"}
    assert compiled["rotate_and_store_kernel"] >= 11


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_of_a_warm_up_compiles_for_gpus(capability: int, tmp_path: Path) -> None:
    compiled = _compile(tmp_path, str(capability), "attention", "Qwen3-0.6B")
    assert compiled == {  # tiles of 16 to 128 rows, and 2 to 32 splits; then one of each with a sliding window
        "mixed_kernel": 4 + 1,
        "split_decode_kernel": 5 + 1,
        "reduce_splits_kernel": 5,
        "_store_kernel": 1,
        "_grouped_linear_kernel": 4,  # tiles of few and of many rows, before and between the two products
    }


@pytest.mark.long
def test_the_kernels_in_the_interpreter(kernels_need_own_process: bool) -> None:
    if not kernels_need_own_process:
        pytest.skip("the Triton tests ran in this process")
    names = ("attention/test_triton_backend.py", "layer_ops", "test_experts.py", "test_store_kvcache.py")
    files = [str(HERE / name) for name in names]
    result = _python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout
