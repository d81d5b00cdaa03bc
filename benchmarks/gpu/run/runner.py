"""Runs parts one after the other, each in a process of its own with a time limit, within one deadline.

A part that raises, aborts, hangs or runs out of memory is recorded and does not touch the others. This module imports
no torch and never uses the GPU, so that nothing a part does to the driver can stop it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.gpu.run.part import Part, read_results

__all__ = ["PartOutcome", "RunOptions", "choose_allocator", "passed_before", "run_parts"]

ROOT = Path(__file__).parents[3]
TAIL = 4000  # characters of a failed part's output that are kept
KILL_S = 10.0  # a process in the driver may not end at once, or at all
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
# As engines on GPUs set it, which is too late in a part that has used the GPU before it loads one. Some virtual GPUs
# cannot map memory; with the first setting every allocation on them would fail.
ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATORS = ("expandable_segments:True", "expandable_segments:False")
PROBE = "import torch; torch.cuda.is_available() and torch.zeros(2**20, device='cuda').sum().item()"
PROBE_S = 120.0


@dataclass(frozen=True)
class RunOptions:
    """How to run the parts.

    Attributes:
        work: directory for results, logs and checkpoints.
        deadline_s: seconds of the whole run.
        device: as torch names it, or ``auto``.
        size: ``full``, ``tiny`` or ``auto``.
        allocator: the setting of torch's allocator.
    """

    work: Path
    deadline_s: float
    device: str = "auto"
    size: str = "auto"
    allocator: str = ALLOCATORS[0]


@dataclass(frozen=True)
class PartOutcome:
    """What became of a part: ``passed``, ``failed`` or ``not run``, and why."""

    status: str
    seconds: float
    faults: list[str]
    figures: dict[str, Any]
    output_tail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome, with the output of a part that failed."""
        document = {"status": self.status, "seconds": round(self.seconds, 1), "figures": self.figures}
        if self.faults:
            document["faults"] = self.faults
        if self.output_tail:
            document["output_tail"] = self.output_tail
        return document


def choose_allocator(device: str) -> str:
    """Return the setting of torch's allocator: the user's own, or the first with which a child process can allocate."""
    if ALLOCATOR in os.environ or device == "cpu":
        return os.environ.get(ALLOCATOR, ALLOCATORS[0])
    for setting in ALLOCATORS:
        with suppress(subprocess.TimeoutExpired):
            probe = subprocess.run(
                [sys.executable, "-c", PROBE], env=os.environ | {ALLOCATOR: setting}, timeout=PROBE_S, check=False
            )
            if probe.returncode == 0:
                return setting
    return ALLOCATORS[0]  # the GPU is broken in another way, which the parts will say


def passed_before(work: Path | None) -> frozenset[str]:
    """Return the names of the parts whose results in a directory of earlier calls say that they have passed."""
    if work is None:
        return frozenset()
    return frozenset(path.stem for path in work.glob("*.json") if not read_results(path)[1])


def run_parts(
    parts: Sequence[Part], options: RunOptions, on_outcome: Callable[[dict[str, PartOutcome]], None]
) -> dict[str, PartOutcome]:
    """Run the parts in their order, each that still fits into the deadline and whose needs have passed.

    Args:
        on_outcome: is called after each part, with the outcomes so far.
    """
    deadline = monotonic() + options.deadline_s
    outcomes: dict[str, PartOutcome] = {}
    passed = passed_before(options.work) - {part.name for part in parts}
    for part in parts:
        left = deadline - monotonic()
        missing = [name for name in part.needs if name not in passed]
        if missing:
            outcomes[part.name] = _not_run(f"it needs '{missing[0]}', which has not passed")
        elif left < part.expected_s:
            outcomes[part.name] = _not_run(f"it takes about {part.expected_s:.0f} s, and {max(left, 0):.0f} s are left")
        else:
            outcomes[part.name] = _run_part(part, options, min(part.limit_s, left))
            passed |= {part.name} if outcomes[part.name].status == "passed" else set()
        on_outcome(outcomes)
    return outcomes


def _not_run(reason: str) -> PartOutcome:
    return PartOutcome("not run", 0.0, [reason], {})


def _run_part(part: Part, options: RunOptions, limit_s: float) -> PartOutcome:
    results, log = options.work / f"{part.name}.json", options.work / f"{part.name}.log"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.run.part_process", "--target", part.target]
    command += ["--arguments", json.dumps(part.arguments), "--device", options.device, "--size", options.size]
    command += ["--work", str(options.work), "--results", str(results)]
    started = monotonic()
    exit_fault = _run_process(command, log, limit_s, options.allocator)
    figures, faults = read_results(results)
    if exit_fault.startswith("exit code"):  # what the part itself has found says more
        faults.append(exit_fault)
    elif exit_fault:
        faults.insert(0, exit_fault)
    tail = log.read_text(errors="replace")[-TAIL:] if faults else ""
    return PartOutcome("failed" if faults else "passed", monotonic() - started, faults, figures, tail)


def _run_process(command: list[str], log: Path, limit_s: float, allocator: str) -> str:
    """Run a command in a process group of its own; return what was wrong with its end, or nothing.

    The output goes to a file, since a pipe would stay open as long as any descendant holds it.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {ALLOCATOR: allocator} | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _exit_fault(process.wait(timeout=limit_s))
    except subprocess.TimeoutExpired:
        _abort(process)
        return f"it took more than {limit_s:.0f} s and was killed"
    finally:
        _kill_group(process)  # after a regular end too: it may have left children


def _abort(process: subprocess.Popen[bytes]) -> None:
    """Make a part print the stacks of its threads, which SIGABRT does, and end."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=KILL_S)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its descendants with SIGKILL, which none can ignore."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=KILL_S)


def _exit_fault(code: int) -> str:
    """Return why the process ended, if it was not with 0."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    hint = "; the kernel sends it when memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({_signal_name(-code)}){hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
