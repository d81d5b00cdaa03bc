"""Check and measure everything that needs a GPU, in six calls of under nine minutes, and write a JSON for each.

    python -m benchmarks.gpu.check --call 1 --work /dev/shm/check --out right.json    # whether answers are right
    python -m benchmarks.gpu.check --call 2 --work /dev/shm/check --out figures.json  # then what is measured
    python -m benchmarks.gpu.check --out result.json                   # all; full sizes on a GPU, tiny ones on a CPU
    python -m benchmarks.gpu.check --size tiny --out r.json            # tiny everywhere
    python -m benchmarks.gpu.check --parts tokens decode_8b --out r.json  # these, and what they need

It needs torch, triton, transformers, xxhash and msgspec; no Ray, no network, no checkpoint: models have random weights.
Later calls take checkpoints and limits from the ``--work`` of the first. flash-attn is checked where it is installed.
Each part runs in a process of its own, within a limit, and the JSON is written after each. On a CPU the same code runs
with the CPU's kernels, which shows that the script works, not that the GPU's kernels do. It exits with 1 if a part
failed or did not run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType

from benchmarks.gpu.parts import CALLS, PARTS, with_needs
from benchmarks.gpu.run.part import write_json
from benchmarks.gpu.run.report import summary, to_document
from benchmarks.gpu.run.runner import PartOutcome, RunOptions, choose_allocator, passed_before, run_parts

__all__ = ["main"]

DEADLINE_S = 530.0
WORK_BYTES = 32 * 2**30  # checkpoints, and room for what torch and Triton write


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Check what needs a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--device", default="auto", help="as torch names it; default: a GPU if there is one")
    parser.add_argument("--size", choices=("auto", "full", "tiny"), default="auto")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="run the parts of one call")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds of the whole run")
    parser.add_argument(
        "--work", type=Path, help="directory for checkpoints and logs, which is kept; default: a new one"
    )
    options = parser.parse_args(arguments)
    names = options.parts or [part.name for part in (PARTS if options.call is None else CALLS[options.call - 1])]
    try:
        parts = with_needs(names, passed_before(options.work))
    except ValueError as error:
        parser.error(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _exit)  # so that the part's processes end too
    started, allocator = monotonic(), choose_allocator(options.device)

    def write(outcomes: dict[str, PartOutcome]) -> None:
        complete = len(outcomes) == len(parts)
        document = to_document(outcomes, seconds=monotonic() - started, complete=complete)
        write_json(options.out, document | {"allocator": allocator})
        name, last = next(reversed(outcomes.items()))
        print(f"{name}: {last.status} after {last.seconds:.1f} s", *last.faults, last.output_tail, sep="\n", flush=True)

    with _work_directory(options.work) as work:
        run_options = RunOptions(work, options.deadline, options.device, options.size, allocator)
        outcomes = run_parts(parts, run_options, write)
    print(f"\n{summary(outcomes)}")
    passed = all(outcome.status == "passed" for outcome in outcomes.values())
    print("passed" if passed else "FAILED", f"in {monotonic() - started:.0f} s")
    return 0 if passed else 1


@contextmanager
def _work_directory(given: Path | None) -> Iterator[Path]:
    """Yield the given directory, or a new one that is removed afterwards, in memory if there is room."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    parents = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    roomy = [parent for parent in parents if parent.is_dir() and shutil.disk_usage(parent).free >= WORK_BYTES]
    with tempfile.TemporaryDirectory(prefix="pagoda-gpu-check-", dir=(roomy or parents[1:])[0]) as directory:
        yield Path(directory)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
