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


@pytest.mark.long
def test_every_kernel_of_a_warm_up_compiles_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = _python("-m", "tests.kernels.compile_for_gpu", "90", "Qwen3-0.6B", **environment)
    assert result.returncode == 0, result.stderr
    compiled = Counter(line.split()[0] for line in result.stdout.splitlines())
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
    files = [
        str(HERE / name) for name in ("attention/test_triton_backend.py", "test_experts.py", "test_store_kvcache.py")
    ]
    result = _python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout
