"""Parts that go wrong in every way that a part on a GPU can; test_gpu_runner.py runs them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.run.part_run import PartRun

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def passes(part: PartRun, figure: int = 1) -> None:
    part.record("figure", figure)


def records_the_allocator(part: PartRun) -> None:
    part.record("allocator", os.environ["PYTORCH_ALLOC_CONF"])


def raises(part: PartRun) -> None:
    part.record("figure", 1)
    raise RuntimeError("planted error")


def finds_a_fault(part: PartRun) -> None:
    part.fault("planted fault")
    part.record("figure", 1)


def aborts(part: PartRun) -> None:
    part.record("figure", 1)
    print("last words", flush=True)
    os.abort()


def segfaults(part: PartRun) -> None:
    ctypes.string_at(0)


def hangs_with_a_child(part: PartRun) -> None:
    """Ignores SIGTERM, and so does its child, which keeps the output open."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM])
    part.record("child", child.pid)
    while True:
        time.sleep(1)


def leaves_a_child(part: PartRun) -> None:
    child = subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM])
    part.record("child", child.pid)


def runs_out_of_memory(part: PartRun) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    bytearray(2**30)


def is_killed(part: PartRun) -> None:
    """As by the kernel when the machine's memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def exits(part: PartRun) -> None:
    """Ends with exit code 0 in the middle of its work, as a library may."""
    os._exit(0)


def records_nan(part: PartRun) -> None:
    part.record("figure", float("nan"))


def writes_garbage(part: PartRun) -> None:
    part.results._path.write_text("[1, 2")
    os._exit(0)


def writes_other_json(part: PartRun) -> None:
    part.results._path.write_text('{"complete": "yes", "faults": [], "figures": {"figure": NaN}}')
    os._exit(0)
