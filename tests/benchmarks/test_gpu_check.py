"""The script for machines with a GPU runs on a CPU too, so it is tested without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_check_runs_on_the_cpu_and_writes_its_json(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--device", "cpu", "--size", "tiny", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["passed"] is True
    assert result["machine"]["versions"]["torch"]
    assert result["store_kvcache"]["cases"] == 27
    assert result["attention"]["cpu"]["cases"] > 100
    assert result["tokens"]["default"]["equal"] == result["tokens"]["small pool"]["equal"] == 24
    assert result["tokens"]["small pool"]["cached_tokens"] > 0
    for batch in ("batch 1", "batch 4"):
        assert result["throughput"][batch]["output_tokens_per_second"] > 0


def test_check_fails_when_a_kernel_is_wrong(tmp_path: Path) -> None:
    """An all-zero attention must not pass."""
    program = (
        "import sys, torch; from kernels.attention.cpu_backend import CpuBackend; "
        "CpuBackend.forward = lambda self, query, *a, **k: torch.zeros_like(query); "
        "from benchmarks.gpu.check import main; "
        f"sys.exit(main(['--device', 'cpu', '--size', 'tiny', '--out', {str(tmp_path / 'r.json')!r}]))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PAGODA_CPU_KERNELS": "0"}  # else C does what the backend does
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert not result["attention"]["passed"]
    assert not result["tokens"]["passed"]
    assert result["store_kvcache"]["passed"]
