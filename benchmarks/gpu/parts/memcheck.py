"""Another part, at tiny sizes, under NVIDIA's compute-sanitizer: no kernel reads or writes beyond its tensors.

A kernel that reads a few bytes too many mostly answers right, because memory is mapped in large pages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.run.part import read_results
from benchmarks.gpu.run.part_run import LIMITS, PartRun

__all__ = ["run"]

TOOL = "compute-sanitizer"
USUAL_PLACE = Path("/usr/local/cuda/bin") / TOOL
FOUND_ERRORS = 86  # exit code
MOST_ERRORS = 20  # that are printed
ERROR = re.compile(  # the kernel is on the next line, unless a launch has failed
    r"^=+ ((?:Invalid|Misaligned|Out-of-range|Program hit).*)(?:\n=+ +at (?:0x[0-9a-f]+ in )?(.+))?$", re.MULTILINE
)
ROOT = Path(__file__).parents[3]


def run(part: PartRun, targets: list[str], arguments: dict[str, Any] | None = None) -> None:
    """Run ``targets``, each in a process that the sanitizer watches; it is skipped without a GPU or the tool.

    Args:
        targets: functions of parts, as ``module:function``.
        arguments: of the functions.
    """
    tool = _tool()
    if not part.on_gpu or tool is None:
        reason = f"no {TOOL}, which comes with CUDA's toolkit" if part.on_gpu else "there is no GPU"
        part.record("skipped", reason)
        part.record("summary", [f"skipped: {reason}"])
        return
    work = part.work / "memcheck"  # whose checkpoints are tiny
    work.mkdir(exist_ok=True)
    shutil.copy(part.work / f"{LIMITS}.json", work)
    for target in targets:
        _run_target(part, work, [str(tool), *_options()], target, arguments or {})


def _tool() -> Path | None:
    found = shutil.which(TOOL)
    if found is not None:
        return Path(found)
    return USUAL_PLACE if USUAL_PLACE.exists() else None


def _options() -> list[str]:
    options = {"tool": "memcheck", "error-exitcode": FOUND_ERRORS, "print-limit": MOST_ERRORS}
    # torch tries calls that a driver may refuse, without harm; it raises an error itself where one matters.
    options["report-api-errors"] = "no"
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _run_target(part: PartRun, work: Path, tool: list[str], target: str, arguments: dict[str, Any]) -> None:
    results = work / f"{target.replace(':', '.')}.json"
    command = [*tool, sys.executable, "-m", "benchmarks.gpu.run.part_process", "--target", target]
    command += ["--arguments", json.dumps(arguments), "--device", str(part.device), "--size", "tiny"]
    command += ["--work", str(work), "--results", str(results)]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    output = process.stdout.decode(errors="replace")
    print(output, flush=True)  # the runner keeps its end
    errors = ERROR.findall(output)
    _, faults = read_results(results)
    part.record(target, {"errors": len(errors), "exit_code": process.returncode})
    for error, kernel in dict.fromkeys(errors):
        part.fault(f"{target}: {error}{f' at {kernel}' if kernel else ''}")
    if not errors and process.returncode:
        part.fault(f"{target}: {TOOL} ended with exit code {process.returncode}")
    for fault in faults:
        part.fault(f"{target}: {fault}")
