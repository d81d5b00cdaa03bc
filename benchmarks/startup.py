"""Seconds from the start of a process to its first token, in total and by part.

    python -m benchmarks.startup --model DIR --repeats 5 --out result.json

Each time is taken from outside, from starting a fresh Python to reading the line that it prints when the first token is
there. "Cold" starts with no compiled kernels, in an empty directory for them; "warm" finds those of a start before.
The checkpoint is in the page cache in both, after a first start that does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.result_file import write_result

__all__ = ["first_token_seconds", "main"]

CACHE_VARIABLE = "PAGODA_CACHE_DIR"  # directory of compiled kernels
TIMEOUT_S = 600.0
ROOT = Path(__file__).resolve().parent.parent


def first_token_seconds(model: str, options: dict[str, Any], cache: Path) -> dict[str, float]:
    """Start a process, wait for its first token, and return the seconds in total and by part.

    Raises:
        RuntimeError: if it ends without one.
    """
    started = time.time()
    command = [sys.executable, "-m", "benchmarks.first_token", "--started", str(started)]
    command += ["--model", model, "--options", json.dumps(options)]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {CACHE_VARIABLE: str(cache)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        total = time.time() - started
        process.communicate(timeout=TIMEOUT_S)
    if not line.startswith("{"):
        raise RuntimeError(f"no first token; the process ended with code {process.returncode}")
    parts: dict[str, float] = json.loads(line)
    return {"total": round(total, 3)} | parts


def measure(model: str, options: dict[str, Any], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return all starts, alternating cold and warm, so that noise affects both alike."""
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="pg-warm") as warm:
        first_token_seconds(model, options, Path(warm))
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="pg-cold") as cold:
                starts["cold"].append(first_token_seconds(model, options, Path(cold)))
            starts["warm"].append(first_token_seconds(model, options, Path(warm)))
    return starts


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table of medians, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="Seconds from the start of a process to its first token.")
    add_engine_arguments(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        options = engine_options(parsed)
    except ValueError as error:
        parser.error(str(error))
    starts = measure(str(Path(parsed.model).resolve()), options, parsed.repeats)
    medians = {
        name: {part: statistics.median(measured[part] for measured in many) for part in many[0]}
        for name, many in starts.items()
    }
    print(f"{'median s':24}" + "".join(f"{name:>8}" for name in medians))
    for part in medians["warm"]:
        print(f"{part:24}" + "".join(f"{median[part]:8.2f}" for median in medians.values()))
    if parsed.out:
        _write(parsed.out, parsed.model, options, medians, starts)


def _write(path: Path, model: str, options: dict[str, Any], medians: Any, starts: Any) -> None:
    import torch

    from benchmarks.machine import describe

    document = {"machine": describe(torch.device("cpu")), "model": Path(model).name, "options": options}
    document |= {"median_s": medians, "starts": starts}
    write_result(path, document)


if __name__ == "__main__":
    main()
