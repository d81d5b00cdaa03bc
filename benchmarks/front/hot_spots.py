"""Where a process spends its CPU time: samples of py-spy, added up by module and by function.

py-spy is a program of its own (`pip install py-spy`). It reads the process's memory from outside, so it neither needs
the interpreter's lock nor prefers the moments when a thread gives it up.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HotSpot", "Profile", "profile", "summarize"]

SAMPLES_PER_S = 400
NUM_HOT_SPOTS = 25
FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*?)(:\d+)?\)$")
STANDARD_LIBRARY = ("asyncio", "json", "contextlib", "threading", "typing", "enum", "dataclasses", "uuid", "copy")


@dataclass(frozen=True)
class HotSpot:
    """A module or function, and its share of the samples."""

    name: str
    share: float
    us: float


@dataclass(frozen=True)
class Profile:
    """The largest shares of one process; ``us`` as in the Cost that it belongs to."""

    samples: int
    modules: list[HotSpot]  # time in a module of ours or in a package, what it calls in the standard library included
    functions: list[HotSpot]  # time in a function itself

    def table(self) -> str:
        """Return both lists side by side."""
        lines = [
            f"{self.samples} samples of the ingress",
            f"{'us':>7} {'%':>5}  {'module':46} {'us':>7} {'%':>5}  function",
        ]
        for index in range(max(len(self.modules), len(self.functions))):
            left = _cell(self.modules, index)
            lines.append(f"{left:60} {_cell(self.functions, index)}".rstrip())
        return "\n".join(lines)


def _cell(spots: list[HotSpot], index: int) -> str:
    if index >= len(spots):
        return ""
    one = spots[index]
    return f"{one.us:7.2f} {100 * one.share:5.1f}  {one.name}"


def profile(py_spy: str, pid: int, seconds: float, us: float) -> Profile:
    """Sample a process for some seconds and share ``us`` out by the samples.

    Raises:
        RuntimeError: if py-spy fails, as without the right to trace the process.
    """
    with tempfile.TemporaryDirectory(prefix="pg-spy") as directory:
        stacks = Path(directory) / "stacks"
        command = [py_spy, "record", "--nonblocking", "--format", "raw", "--output", str(stacks)]
        command += ["--pid", str(pid), "--duration", str(int(seconds)), "--rate", str(SAMPLES_PER_S)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not stacks.exists():
            raise RuntimeError(f"py-spy ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        return summarize(stacks.read_text().splitlines(), us)


def summarize(stacks: Iterable[str], us: float) -> Profile:
    """Add up collapsed stacks: frames as ``function (file:line)`` from the outermost, then the number of samples."""
    modules: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        parsed = [found for frame in frames.split(";") if (found := FRAME.match(frame))]
        if not parsed:
            continue
        functions[f"{parsed[-1]['function']} ({parsed[-1]['file']})"] += int(count)
        modules[next((name for one in reversed(parsed) if (name := _module(one["file"]))), "standard library")] += int(
            count
        )
    total = sum(functions.values())
    return Profile(total, _largest(modules, total, us), _largest(functions, total, us))


def _largest(counts: Counter[str], total: int, us: float) -> list[HotSpot]:
    return [
        HotSpot(name, round(count / total, 4), round(us * count / total, 2))
        for name, count in counts.most_common(NUM_HOT_SPOTS)
    ]


def _module(file: str) -> str | None:
    """Return the module of ours or the package that a file belongs to; None for the standard library."""
    package, _, rest = file.partition("/")
    if package in ("deployments", "engine", "benchmarks"):
        return file.removesuffix(".py")
    if not rest or package in STANDARD_LIBRARY:
        return None
    return package
