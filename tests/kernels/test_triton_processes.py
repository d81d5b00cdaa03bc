"""Tests in a Python process of their own: Triton decides once a process whether it interprets or compiles."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = _python(str(HERE / "compile_for_gpu.py"), "90", **environment)
    assert result.returncode == 0, result.stderr
    compiled = [line.split()[0] for line in result.stdout.splitlines()]
    splits = ["split_decode_kernel", "reduce_splits_kernel"]
    assert compiled == ["mixed_kernel", "mixed_kernel", *splits, *splits, "_store_kernel"]


def test_the_kernels_in_the_interpreter(kernels_need_own_process: bool) -> None:
    if not kernels_need_own_process:
        pytest.skip("the Triton tests ran in this process")
    files = [str(HERE / name) for name in ("attention/test_triton_backend.py", "test_store_kvcache.py")]
    result = _python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout
