"""The process of one part. runner.py starts it:

    python -m benchmarks.gpu.run.part_process --target MODULE:FUNCTION --arguments JSON --work DIR --results FILE ...

It prints the stacks of all threads when it crashes, as the runner lets it do when it takes too long.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.run.part import PartResults
from benchmarks.gpu.run.part_run import PartRun

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the part; return 1 if it raised."""
    parser = argparse.ArgumentParser(description="Run one part.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", default="auto")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args(arguments)
    _die_first_when_memory_runs_out()
    faulthandler.enable()
    results = PartResults(options.results)
    try:
        module, _, function = options.target.partition(":")
        part = getattr(import_module(module), function)
        part(PartRun(options.device, options.size, options.work, results), **options.arguments)
    except BaseException as error:
        traceback.print_exc()
        results.fault(f"{type(error).__name__}: {error}"[:500])
        return 1
    results.finish()
    return 0


def _die_first_when_memory_runs_out() -> None:
    """Make the kernel choose this process rather than the one that writes the JSON."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
